"""Text encoders: shape, zeros behind the end, sameness, the store on disk."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from memer.errors import MemerError, SourceUnavailableError
from memer.plan_settings import TextSettings
from models.text import HashedText, Umt5Text, make_text_encoder

HASHED = TextSettings()

#: First numbers of "press" at the first place.
GOLDEN = (0.61388886, -1.17983794, -1.30737627)


@pytest.fixture(scope="module")
def umt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random UMT5 with a tokenizer of whole words, laid out as a pipeline's folder."""
    folder = tmp_path_factory.mktemp("umt5")
    torch.manual_seed(0)
    config = UMT5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    words = ["<pad>", "</s>", "<unk>", "put", "the", "red", "blue", "block", "on", "task", ":"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's embeddings are kept."""
    monkeypatch.setenv("MEMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "texts"


def settings_of(folder: Path, **kwargs) -> TextSettings:
    return TextSettings(**{"kind": "umt5", "max_tokens": 12, "dim": 16, "model": str(folder), **kwargs})


def test_hashed_words_then_zeros() -> None:
    encoded = HashedText(HASHED).encode(["press the button", ""])
    assert encoded.shape == (2, 8, 32)
    assert encoded.dtype == torch.float32
    assert (encoded[0, :3].abs().sum(-1) > 1).all()
    assert not encoded[0, 3:].any()
    assert not encoded[1].any()


def test_hashed_bits_never_change() -> None:
    """A trained model depends on them."""
    first = HashedText(HASHED).encode(["press"])[0, 0, :3]
    again = HashedText(HASHED).encode(["wait", "Press"])[1, 0, :3]
    assert torch.equal(first, again)
    torch.testing.assert_close(first, torch.tensor(GOLDEN), rtol=0, atol=1e-6)


def test_hashed_texts_differ_by_word_and_by_order() -> None:
    texts = ["red onto blue", "blue onto red", "red onto green"]
    a, b, c = HashedText(HASHED).encode(texts)
    assert not torch.allclose(a.sum(0), b.sum(0))
    assert not torch.allclose(a, c)


def test_hashed_texts_beyond_the_last_token_keep_every_word() -> None:
    words = [f"w{k}" for k in range(20)]
    base = HashedText(HASHED).encode([" ".join(words)])
    for place in range(20):
        changed = [*words[:place], "other", *words[place + 1 :]]
        assert not torch.allclose(HashedText(HASHED).encode([" ".join(changed)]), base)


def test_umt5_equals_the_library_and_is_zero_behind_the_end(umt5: Path) -> None:
    encoder = make_text_encoder(settings_of(umt5, template="task: {text}"))
    assert isinstance(encoder, Umt5Text)
    encoded = encoder.encode(["put the red block", "put", "put the red block"])
    assert encoded.shape == (3, 12, 16)
    ids = encoder.tokenizer("task: put the red block", return_tensors="pt").input_ids
    assert ids.shape[1] == 7
    with torch.no_grad():
        expected = encoder.encoder(ids).last_hidden_state[0]
    torch.testing.assert_close(encoded[0, :7], expected, rtol=0, atol=1e-5)
    assert not encoded[0, 7:].any()
    assert torch.equal(encoded[0], encoded[2])


def test_umt5_refuses_what_does_not_fit(umt5: Path) -> None:
    with pytest.raises(MemerError, match=r"10 tokens.*max_tokens=4"):
        make_text_encoder(settings_of(umt5, max_tokens=4)).encode(
            ["put the red block on the blue block block"]
        )
    with pytest.raises(MemerError, match=r"text\.dim=32"):
        make_text_encoder(settings_of(umt5, dim=32))
    with pytest.raises(SourceUnavailableError, match="no such folder"):
        make_text_encoder(settings_of(umt5 / "missing"))


def test_umt5_is_asked_once_per_text_and_loaded_for_new_ones_alone(umt5: Path, kept: Path) -> None:
    texts = ["put the red block", "put"]
    first = make_text_encoder(settings_of(umt5)).encode(texts)
    assert len(list(kept.iterdir())) == 3  # and the empty text, which shows at once that there is an encoder
    again = make_text_encoder(settings_of(umt5))
    assert torch.equal(again.encode(texts), first)
    assert not {"encoder", "tokenizer"} & set(vars(again))
    assert torch.equal(again.encode(["put", "put the blue block"])[0], first[1])
    assert "encoder" in vars(again)
    assert len(list(kept.iterdir())) == 4


@pytest.mark.parametrize(
    "change", [{"template": "task: {text}"}, {"max_tokens": 9}, {"model": "other"}, {"dtype": torch.bfloat16}]
)
def test_embeddings_of_another_encoder_are_not_taken(
    umt5: Path, kept: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    make_text_encoder(settings_of(umt5)).encode(["put"])
    if change.get("model"):
        change = {"model": str(shutil.copytree(umt5, tmp_path / "other", copy_function=shutil.copyfile))}
    dtype = {"dtype": change.pop("dtype")} if "dtype" in change else {}
    other = Umt5Text(settings_of(umt5, **change), **dtype)
    other.encode(["put"])
    assert "encoder" in vars(other)
    assert len(list(kept.iterdir())) == 4


def test_damaged_or_forbidden_places_cost_only_time(
    umt5: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make_text_encoder(settings_of(umt5)).encode(["put"])
    for file in kept.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert torch.equal(make_text_encoder(settings_of(umt5)).encode(["put"]), expected)
    assert "encoded again" in caplog.text
    mended = make_text_encoder(settings_of(umt5))
    assert torch.equal(mended.encode(["put"]), expected)
    assert "encoder" not in vars(mended)
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMER_CACHE", str(tmp_path / "file"))
    assert torch.equal(make_text_encoder(settings_of(umt5)).encode(["put"]), expected)
    assert "set MEMER_CACHE" in caplog.text
