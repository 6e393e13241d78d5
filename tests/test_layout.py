"""The rooms and the arrows between them, as the README's file table draws them."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = {"agent", "chat_server", "generator", "estimators", "losses", "weight_sync", "trainer", "train"}
ARROWS = {                             # module -> what of ours it may import, at its top or inside a function
    "agent": set(),
    "chat_server": {"agent"},
    "generator": {"agent", "chat_server"},
    "estimators": {"agent"},
    "losses": set(),
    "weight_sync": set(),
    "trainer": {"agent", "estimators", "losses", "weight_sync"},
    "train": ROOMS - {"train"},
}


def imports(path: Path, top_only: bool = False) -> set[str]:
    """First parts of the names of all modules that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else ast.walk(tree)
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)} if top_only else set()
    if not top_only:
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def test_the_top_level_holds_the_rooms_and_nothing_else():
    assert {p.stem for p in ROOT.glob("*.py")} == ROOMS


def test_each_room_imports_only_what_its_arrows_allow():
    for room, allowed in ARROWS.items():
        assert imports(ROOT / f"{room}.py") & ROOMS <= allowed, room


def test_only_recipes_and_tests_import_train():
    assert not [room for room in ROOMS if "train" in imports(ROOT / f"{room}.py")]


def test_agent_knows_no_engine_and_losses_know_only_torch():
    assert not imports(ROOT / "agent.py") & {"vllm", "torch", "ray", "fastapi", "openai", "anthropic"}
    assert imports(ROOT / "losses.py") <= {"torch", "collections", "dataclasses", "typing"}


def test_weight_sync_imports_neither_ray_nor_automodel_at_its_top():
    """vLLM's worker imports it by name."""
    assert not imports(ROOT / "weight_sync.py", top_only=True) & {"ray", "nemo_automodel", "transformers"}


def test_nothing_is_reached_with_a_default_or_by_a_string_but_the_receiver():
    """No getattr with a default; the one string that names code of ours is vLLM's worker_extension_cls."""
    for room in ROOMS:
        for node in ast.walk(ast.parse((ROOT / f"{room}.py").read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                assert len(node.args) == 2, f"{room}.py:{node.lineno}"
    assert [room for room in ROOMS if "weight_sync.Receiver" in (ROOT / f"{room}.py").read_text()] == ["generator"]


def test_the_loop_fits_one_screen():
    tree = ast.parse((ROOT / "train.py").read_text())
    loop = next(n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef) and n.name == "loop")
    assert loop.end_lineno - loop.lineno < 40
