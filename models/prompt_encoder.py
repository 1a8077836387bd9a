"""Questions and answers to token ids, positions and labels, without a processor class and without a model.

Image processor and tokenizer are used directly: the stock Qwen3-VL processor cannot be built without
torchvision. Every fact about a sample (which tokens are pictures, which are trained) is known from how the
sequence is put together; nothing is searched for in token ids.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.prompts import answer_text, render_messages
from memer.sample import FrameKey, PlannerQuestion, PlannerSample
from models.pixels import PixelGeometry, Size, normalized

#: What a trained token belongs to: JSON around the values, the label, the positions, the end of the turn.
STRUCTURE, LABEL, POSITIONS, END = range(4)

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSample:
    """One prompt, with its answer where there is one.

    Attributes:
        input_ids: int64[L].
        mm_token_type_ids: int64[L], 0 text, 1 picture.
        positions: int64[3, L], time, height and width position of every token, starting at 0.
        labels: int64[L], the id itself where trained, -100 elsewhere; `labels[0]` is always -100.
        kinds: int64[L], STRUCTURE, LABEL, POSITIONS or END where trained, -1 elsewhere.
        image_keys: pictures in prompt order.
        image_starts: index of the first token of each picture.
        image_grids: (rows, columns) of each picture, patches.
    """

    input_ids: NDArray[np.int64]
    mm_token_type_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    labels: NDArray[np.int64]
    kinds: NDArray[np.int64]
    image_keys: tuple[FrameKey, ...]
    image_starts: tuple[int, ...]
    image_grids: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Trained tokens."""
        return int((self.labels != IGNORED).sum())


def mrope_positions(
    mm_token_type_ids: NDArray[np.int64], merged_grids: Sequence[tuple[int, int]]
) -> NDArray[np.int64]:
    """Rotary positions of one unpadded sequence; equal to the model's own `get_rope_index`, without a model.

    Text advances all three axes by one per token. A picture's tokens share the time position and count rows
    and columns; afterwards the axes go on at its start plus the longer side of its grid.

    Args:
        mm_token_type_ids: int64[L], 0 text, 1 picture.
        merged_grids: (rows, columns) of each picture, tokens.

    Returns:
        int64[3, L].
    """
    positions = np.empty((3, len(mm_token_type_ids)), dtype=np.int64)
    index = current = 0
    for rows, columns in merged_grids:
        ahead = int(np.argmax(mm_token_type_ids[index:] == 1))
        positions[:, index : index + ahead] = np.arange(current, current + ahead)
        index, current = index + ahead, current + ahead
        cells = np.arange(rows * columns)
        span = slice(index, index + rows * columns)
        positions[0, span] = current
        positions[1, span] = current + cells // columns
        positions[2, span] = current + cells % columns
        index, current = index + rows * columns, current + max(rows, columns)
    positions[:, index:] = np.arange(current, current + len(mm_token_type_ids) - index)
    return positions


class PromptEncoder:
    """Renders, tokenises and lays out samples for one base model under one contract.

    Args:
        tokenizer: a fast tokenizer with the Qwen special tokens.
        image_processor: the base model's; the contract's pixel bounds replace its own, checked on a probe.
        contract: prompt words, form and pixel bounds.
    """

    def __init__(self, tokenizer: Any, image_processor: Any, contract: Contract) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.contract = contract
        self.geometry = PixelGeometry(
            min_pixels=contract.min_pixels,
            max_pixels=contract.max_pixels,
            patch_size=image_processor.patch_size,
            merge_size=image_processor.merge_size,
            temporal_patch_size=image_processor.temporal_patch_size,
            mean=tuple(image_processor.image_mean),
            std=tuple(image_processor.image_std),
        )
        self.turn_start_id = self._special("<|im_start|>")
        self.turn_end_id = self._special("<|im_end|>")
        self.vision_start_id = self._special("<|vision_start|>")
        self.vision_end_id = self._special("<|vision_end|>")
        self.image_id = self._special("<|image_pad|>")
        self.pad_id: int = self.turn_end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._text_ids: dict[str, tuple[int, ...]] = {}
        self.check_pixels()
        self._answer_header = self._check_template()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_text_ids": {}}

    def encode_question(
        self, question: PlannerQuestion, *, sizes: Mapping[FrameKey, Size] | None = None
    ) -> EncodedSample:
        """Lay out a question up to the point where the answer starts.

        Args:
            question: its frames may be absent when `sizes` is given.
            sizes: (height, width) of every picture in px, so that tokens are counted without decoding.
        """
        return self._layout(question, sizes, answer=())

    def encode_sample(
        self, sample: PlannerSample, *, sizes: Mapping[FrameKey, Size] | None = None
    ) -> EncodedSample:
        """Lay out a question with its answer; trained are its text and the token that ends the turn."""
        return self._layout(sample.question, sizes, answer=self._answer(sample))

    def decode_answer(self, ids: Sequence[int]) -> str:
        """Text of generated ids, up to the end of the turn."""
        kept = list(ids)
        for end in {self.turn_end_id, self.pad_id}:
            if end in kept:
                kept = kept[: kept.index(end)]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def check_pixels(self) -> None:
        """Compare our patches with the image processor's own on a picture of the contract's size.

        Raises:
            MemerError: another grid or other pixels, so training and serving would see different pictures.
        """
        width, height = self.contract.cameras.stacked_size
        rows, columns = np.mgrid[0:height, 0:width]
        probe = np.stack([rows * 7, columns * 5, rows + columns * 3], axis=-1).astype(np.uint8)
        bounds = {"shortest_edge": self.contract.min_pixels, "longest_edge": self.contract.max_pixels}
        found = self.image_processor(images=[probe], size=bounds, return_tensors="np")
        grid = tuple(int(n) for n in found["image_grid_thw"][0][1:])
        if grid != self.geometry.grid((height, width)):
            raise MemerError(
                f"image processor {type(self.image_processor).__name__}: a picture of {width} x {height} px "
                f"within {self.contract.min_pixels} .. {self.contract.max_pixels} px becomes {grid} patches, "
                f"expected {self.geometry.grid((height, width))}; does preprocessor_config.json fit?"
            )
        ours = normalized(torch.from_numpy(self.geometry.patches(probe)), self.geometry)
        copies = np.asarray(found["pixel_values"]).reshape(
            len(ours), 3, self.geometry.temporal_patch_size, self.geometry.patch_size**2
        )
        if not np.allclose(ours.view(len(ours), 3, 1, -1).numpy(), copies, atol=1e-5):
            raise MemerError(
                f"image processor {type(self.image_processor).__name__}: pixels differ from ours on a probe "
                "picture; its preprocessor_config.json asks for steps that memer does not know"
            )

    def _special(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == self.tokenizer.unk_token_id:
            raise UsageError(
                f"tokenizer of {self.tokenizer.name_or_path}: no token {token}; not a Qwen-VL model"
            )
        return int(token_id)

    def _check_template(self) -> str:
        """Hold the base's chat template against our rendering; return the text that opens an answer."""
        opening = "<|im_start|>assistant\n"
        if not self.tokenizer.chat_template:
            return opening
        probe: list[dict[str, Any]] = [
            {"role": "system", "content": [{"type": "text", "text": "first"}]},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "second"}]},
        ]
        body = "".join(
            [
                "<|im_start|>system\nfirst<|im_end|>\n",
                "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>second<|im_end|>\n",
            ]
        )
        served = self.tokenizer.apply_chat_template(
            probe, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        if not served.startswith(body + opening):
            raise MemerError(
                f"chat template of {self.tokenizer.name_or_path} renders {served!r}, training would use "
                f"{body + opening!r}; a served model would see another prompt"
            )
        return str(served[len(body) :])

    def _ids(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; control strings inside it stay text."""
        if text not in self._text_ids:
            if len(self._text_ids) > 10_000:
                self._text_ids.clear()
            encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
            self._text_ids[text] = tuple(encoded["input_ids"])
        return self._text_ids[text]

    def _answer(self, sample: PlannerSample) -> list[tuple[int, int]]:
        """(id, kind) of every trained token."""
        text = answer_text(sample.subtask, sample.positions, self.contract.prompt)
        if self.contract.prompt.form == "segments":
            return [*((token_id, LABEL) for token_id in self._ids(text)), (self.turn_end_id, END)]
        encoded = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )
        label_start = text.index(":") + 1
        label_start += len(text[label_start:]) - len(text[label_start:].lstrip())
        label_end = json.JSONDecoder().raw_decode(text, label_start)[1]
        positions_start = text.rfind("[") if self.contract.prompt.answer_positions else len(text)
        answer = []
        for token_id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if end > positions_start:
                kind = POSITIONS
            else:
                kind = LABEL if start < label_end and end > label_start + 1 else STRUCTURE
            answer.append((int(token_id), kind))
        return answer + [(self.turn_end_id, END)]

    def _layout(
        self,
        question: PlannerQuestion,
        sizes: Mapping[FrameKey, Size] | None,
        *,
        answer: Sequence[tuple[int, int]],
    ) -> EncodedSample:
        keys = question.image_keys
        grids = []
        for key in keys:
            if sizes is not None:
                size = sizes[key]
            elif key in question.frames:
                size = question.frames[key].shape[:2]
            else:
                raise MemerError(f"frame {key}: named by the question but its picture is missing")
            grids.append(self.geometry.grid(size))

        ids: list[int] = []
        starts: list[int] = []
        for message in render_messages(question, self.contract.prompt):
            ids.append(self.turn_start_id)
            run = message["role"] + "\n"
            for part in message["content"]:
                if part["type"] == "text":
                    run += part["text"]
                    continue
                if len(starts) == len(grids):
                    raise MemerError(
                        f"prompt has more picture marks than the question's {len(grids)} pictures"
                    )
                ids += self._ids(run)
                run = ""
                ids.append(self.vision_start_id)
                starts.append(len(ids))
                rows, columns = grids[len(starts) - 1]
                ids += [self.image_id] * (rows * columns // self.geometry.merge_size**2)
                ids.append(self.vision_end_id)
            ids += self._ids(run)
            ids.append(self.turn_end_id)
            ids += self._ids("\n")
        if len(starts) != len(grids):
            raise MemerError(
                f"prompt has {len(starts)} picture marks for the question's {len(grids)} pictures"
            )
        ids += self._header_ids()

        prompt_length = len(ids)
        ids += [token_id for token_id, _ in answer]
        input_ids = np.array(ids, dtype=np.int64)
        types = np.zeros_like(input_ids)
        merge = self.geometry.merge_size
        for start, (rows, columns) in zip(starts, grids, strict=True):
            types[start : start + rows * columns // merge**2] = 1
        labels = np.full_like(input_ids, IGNORED)
        labels[prompt_length:] = input_ids[prompt_length:]
        kinds = np.full_like(input_ids, -1)
        kinds[prompt_length:] = [kind for _, kind in answer]
        return EncodedSample(
            input_ids=input_ids,
            mm_token_type_ids=types,
            positions=mrope_positions(types, [(rows // merge, columns // merge) for rows, columns in grids]),
            labels=labels,
            kinds=kinds,
            image_keys=keys,
            image_starts=tuple(starts),
            image_grids=tuple(grids),
        )

    def _header_ids(self) -> list[int]:
        start = "<|im_start|>"
        return [self.turn_start_id, *self._ids(self._answer_header.removeprefix(start))]
