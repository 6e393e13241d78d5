"""Makes a random vision-language policy of 0.2M parameters over bytes, for tests and for trying images on a CPU.

    python recipes/make_vision.py --out models/vision                      Idefics3: each image is cut into tiles
    python recipes/make_vision.py --out models/vision --kind qwen2_5_vl    Qwen2.5-VL: rotary positions of rows and columns; vLLM's class needs torchvision

Its image processor is the model's own at small sizes, its tokenizer that of recipes/tiny with the marks of images added.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recipes.make_tiny import make_tokenizer  # noqa: E402

TEMPLATE = ("{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
            "{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}<|im_end|>\n"
            "{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}")


@dataclass(frozen=True)
class Config:
    """Write a random vision-language policy."""

    out: str                           # where to write it
    kind: Literal["idefics3", "qwen2_5_vl"] = "idefics3"   # its architecture
    width: int = 64                    # of the language model and of its vision tower
    layers: int = 2                    # of each
    seed: int = 0                      # of its weights

    @property
    def head(self) -> int:
        return 32 if self.width == 64 else 64

    def text(self, tokenizer) -> dict:
        heads = self.width // self.head
        return dict(hidden_size=self.width, intermediate_size=self.width * 11 // 4, num_hidden_layers=self.layers, num_attention_heads=heads, num_key_value_heads=heads,
                    max_position_embeddings=1024, tie_word_embeddings=False, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def make_idefics3(cfg: Config, tokenizer):
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil, Idefics3Processor

    tokenizer.add_special_tokens({"additional_special_tokens": [
        "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *[f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)]]})
    tokenizer.chat_template = TEMPLATE % "<image>"
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})      # 32 x 32 pixels a tile
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), pad_token_id=tokenizer.pad_token_id, scale_factor=2, tie_word_embeddings=True,
        vision_config=dict(hidden_size=cfg.width, intermediate_size=2 * cfg.width, num_hidden_layers=cfg.layers, num_attention_heads=cfg.width // cfg.head, image_size=32, patch_size=8),
        text_config=cfg.text(tokenizer) | dict(model_type="llama", head_dim=cfg.head, tie_word_embeddings=True))
    return Idefics3ForConditionalGeneration(config), Idefics3Processor(images, tokenizer, image_seq_len=4)


def make_qwen(cfg: Config, tokenizer):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = TEMPLATE % "".join(marks[:3])
    start, image, end, video = tokenizer.convert_tokens_to_ids(marks)
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}                                            # pixels of an image
    config = Qwen2_5_VLConfig(
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
        vision_config=dict(depth=cfg.layers, hidden_size=cfg.width, intermediate_size=2 * cfg.width, num_heads=cfg.width // cfg.head, out_hidden_size=cfg.width, window_size=56,
                           fullatt_block_indexes=[cfg.layers - 1]),
        text_config=cfg.text(tokenizer) | dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [cfg.head // 8, cfg.head * 3 // 16, cfg.head * 3 // 16]}))
    return Qwen2_5_VLForConditionalGeneration(config), Qwen2_5_VLProcessor(Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size))


def make(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    model, processor = {"idefics3": make_idefics3, "qwen2_5_vl": make_qwen}[cfg.kind](cfg, make_tokenizer())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(32 / cfg.width**0.5)      # or all would look alike to it: what it says must depend on what it sees
    model.save_pretrained(cfg.out)
    processor.save_pretrained(cfg.out)
    processor.tokenizer.save_pretrained(cfg.out)


if __name__ == "__main__":
    make(tyro.cli(Config))
