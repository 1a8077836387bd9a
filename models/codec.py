"""Frozen visual codecs: clips of 1 + 4 m frames to 1 + m latent frames and back, at once or as a stream.

Every codec is causal: a latent frame never depends on later frames, so latents of finished segments stay
valid while the episode grows. Streams carry their state as a value. A segment's 8 frames are never encoded
alone (the Wan encoder would drop three of them silently): they follow the frame or stream before them.

Letters in shapes: B batch, C channels, s spatial ratio, h = H / s, w = W / s.

Source: MaP-WAM (arXiv 2609.11561); diffusers 0.42 AutoencoderKLWan.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import Tensor

from memer.errors import MemerError
from memer.plan_settings import TEMPORAL_RATIO, CodecSettings
from models.pretrained import load_part


@dataclass(frozen=True, slots=True)
class CodecState:
    """Where a stream stands; a value, so a kept copy continues from where it was taken.

    Attributes:
        count: latent frames so far.
        features: what the codec remembers, opaque.
    """

    count: int = 0
    features: tuple[Any, ...] = ()


class VisualCodec(Protocol):
    """Frames float[B, 3, 1 + 4 m, H, W] in [-1, 1] to normalised latents float32[B, C, 1 + m, h, w], back."""

    temporal_ratio: int
    spatial_ratio: int
    channels: int

    def encode(self, x: Tensor) -> Tensor:
        """A whole clip. ValueError unless it has 1 + 4 m frames."""

    def decode(self, z: Tensor) -> Tensor:
        """All frames of the latents, in [-1, 1]."""

    def enc_init(self) -> CodecState:
        """An encoder before its first frame."""

    def dec_init(self) -> CodecState:
        """A decoder before its first latent."""

    def enc_step(self, state: CodecState, frames: Tensor) -> tuple[Tensor, CodecState]:
        """Encode the next frames: exactly 1 in the first call, a multiple of 4 later."""

    def dec_step(self, state: CodecState, z: Tensor) -> tuple[Tensor, CodecState]:
        """Decode the next latents: the stream's first gives 1 frame, every other 4."""

    def fingerprint(self) -> str:
        """A short text that differs between codecs with different latents."""


class _StreamCodec(ABC):
    """A codec is its stream: a clip is a stream from the start, so both give the same bits."""

    temporal_ratio = TEMPORAL_RATIO

    def __init__(self, *, spatial_ratio: int, channels: int) -> None:
        self.spatial_ratio = spatial_ratio
        self.channels = channels

    def encode(self, x: Tensor) -> Tensor:
        """See VisualCodec."""
        self._check_frames(x)
        if x.shape[2] % TEMPORAL_RATIO != 1:
            raise ValueError(
                f"a clip of {x.shape[2]} frames: must be 1 + 4 m; a segment follows the frame before it"
            )
        z, state = self.enc_step(self.enc_init(), x[:, :, :1])
        return z if x.shape[2] == 1 else torch.cat((z, self.enc_step(state, x[:, :, 1:])[0]), dim=2)

    def decode(self, z: Tensor) -> Tensor:
        """See VisualCodec."""
        return self.dec_step(self.dec_init(), z)[0]

    def enc_init(self) -> CodecState:
        """See VisualCodec."""
        return CodecState()

    def dec_init(self) -> CodecState:
        """See VisualCodec."""
        return CodecState()

    def enc_step(self, state: CodecState, frames: Tensor) -> tuple[Tensor, CodecState]:
        """See VisualCodec."""
        self._check_frames(frames)
        count = frames.shape[2]
        if state.count == 0 and count != 1:
            raise ValueError(f"an encoder stream starts with 1 frame, got {count}")
        if state.count > 0 and (count == 0 or count % TEMPORAL_RATIO):
            raise ValueError(f"an encoder stream goes on by a multiple of 4 frames, got {count}")
        return self._encode(state, frames)

    def dec_step(self, state: CodecState, z: Tensor) -> tuple[Tensor, CodecState]:
        """See VisualCodec."""
        if z.dim() != 5 or z.shape[1] != self.channels or z.shape[2] == 0:
            raise ValueError(f"latents of shape {tuple(z.shape)}: must be [B, {self.channels}, m >= 1, h, w]")
        return self._decode(state, z)

    def _check_frames(self, x: Tensor) -> None:
        s = self.spatial_ratio
        if x.dim() != 5 or x.shape[1] != 3 or not x.is_floating_point():
            raise ValueError(
                f"frames of shape {tuple(x.shape)}, {x.dtype}: must be float[B, 3, 1 + 4 m, H, W] in [-1, 1]"
            )
        if x.shape[3] % s or x.shape[4] % s:
            raise ValueError(f"frames of {x.shape[3]}x{x.shape[4]} px: must be multiples of {s}")

    @abstractmethod
    def _encode(self, state: CodecState, frames: Tensor) -> tuple[Tensor, CodecState]: ...

    @abstractmethod
    def _decode(self, state: CodecState, z: Tensor) -> tuple[Tensor, CodecState]: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """See VisualCodec."""


class PatchCodec(_StreamCodec):
    """Space and time to depth: without loss, without weights.

    The first frame counts as four equal ones; then four frames become one latent frame with
    z[b, (c, tau, y, x), g, row, col] = (frames[b, c, 4 g + tau, s row + y, s col + x] - mean[c]) / std[c],
    C = 3 * 4 * s * s.

    Args:
        spatial_ratio: s.
        mean: per colour, of frames in [-1, 1]; see CodecSettings.
        std: per colour.
    """

    def __init__(
        self,
        spatial_ratio: int = 4,
        *,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        channels = 3 * TEMPORAL_RATIO * spatial_ratio**2
        super().__init__(spatial_ratio=spatial_ratio, channels=channels)
        self._mean, self._std = (torch.tensor(values).reshape(1, 3, 1, 1, 1) for values in (mean, std))

    def fingerprint(self) -> str:
        """See VisualCodec."""
        colors = [f"{value:g}" for values in (self._mean, self._std) for value in values.flatten().tolist()]
        return f"patch-s{self.spatial_ratio}-" + ",".join(colors)

    def _encode(self, state: CodecState, frames: Tensor) -> tuple[Tensor, CodecState]:
        x = (frames.float() - self._mean.to(frames.device)) / self._std.to(frames.device)
        if state.count == 0:
            x = x.expand(-1, -1, TEMPORAL_RATIO, -1, -1)
        b, c, t, height, width = x.shape
        s, groups = self.spatial_ratio, t // TEMPORAL_RATIO
        x = x.reshape(b, c, groups, TEMPORAL_RATIO, height // s, s, width // s, s)
        z = x.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(b, self.channels, groups, height // s, width // s)
        return z, CodecState(state.count + groups)

    def _decode(self, state: CodecState, z: Tensor) -> tuple[Tensor, CodecState]:
        b, _, groups, rows, columns = z.shape
        s = self.spatial_ratio
        x = z.float().reshape(b, 3, TEMPORAL_RATIO, s, s, groups, rows, columns)
        x = x.permute(0, 1, 5, 2, 6, 3, 7, 4)
        x = x.reshape(b, 3, groups * TEMPORAL_RATIO, rows * s, columns * s)
        if state.count == 0:
            x = x[:, :, TEMPORAL_RATIO - 1 :]
        x = (x * self._std.to(z.device) + self._mean.to(z.device)).clamp(-1, 1)
        return x, CodecState(state.count + groups)


class WanCodec(_StreamCodec):
    """The Wan video autoencoder, frozen: the posterior's mode, normalised by the config's mean and deviation.

    Runs in the weights' own dtype whatever autocast is in force, and never tiles, so that training and run
    time take the same numeric path.

    Args:
        vae: taken over: put into eval mode, its weights no longer require gradients.

    Raises:
        MemerError: its temporal ratio is not 4.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        config = vae.config
        ratio = 2 ** sum(config.temperal_downsample)
        if ratio != TEMPORAL_RATIO:
            raise MemerError(f"autoencoder: temporal ratio {ratio}, must be {TEMPORAL_RATIO}")
        self._patch = config.patch_size or 1
        spatial = self._patch * 2 ** (len(config.dim_mult) - 1)
        super().__init__(spatial_ratio=spatial, channels=config.z_dim)
        self.vae = vae.eval().requires_grad_(False)
        shape = (1, config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean, device=vae.device).reshape(shape)
        self._std = torch.tensor(config.latents_std, device=vae.device).reshape(shape)
        self._fingerprint = ""

    @classmethod
    def from_pretrained(
        cls, name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "WanCodec":
        """Load a folder with an autoencoder, a pipeline's folder with `vae` in it, or a pipeline's hub id."""
        return cls(load_part(AutoencoderKLWan, name, part="vae", torch_dtype=dtype).to(device))

    def fingerprint(self) -> str:
        """See VisualCodec. A hash of configuration, dtype and all weights."""
        if not self._fingerprint:
            config = {k: v for k, v in self.vae.config.items() if not k.startswith("_")}
            digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=list).encode())
            for name, value in self.vae.state_dict().items():
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
                digest.update(value.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
            self._fingerprint = f"wan-{digest.hexdigest()[:16]}"
        return self._fingerprint

    @torch.no_grad()
    def _encode(self, state: CodecState, frames: Tensor) -> tuple[Tensor, CodecState]:
        features = self._features(state, "encoder")
        with torch.autocast(frames.device.type, enabled=False):
            x = patchify(frames.to(self.vae.dtype), self._patch)
            chunks = [x] if state.count == 0 else x.split(TEMPORAL_RATIO, dim=2)
            z = torch.cat(
                [
                    self.vae.quant_conv(self.vae.encoder(chunk, feat_cache=features, feat_idx=[0]))
                    for chunk in chunks
                ],
                dim=2,
            )
        z = (z[:, : self.channels].float() - self._mean) / self._std
        return z, CodecState(state.count + len(chunks), tuple(features))

    @torch.no_grad()
    def _decode(self, state: CodecState, z: Tensor) -> tuple[Tensor, CodecState]:
        features = self._features(state, "decoder")
        with torch.autocast(z.device.type, enabled=False):
            latents = self.vae.post_quant_conv((z.float() * self._std + self._mean).to(self.vae.dtype))
            x = torch.cat(
                [
                    self.vae.decoder(
                        latent, feat_cache=features, feat_idx=[0], first_chunk=state.count + i == 0
                    )
                    for i, latent in enumerate(latents.split(1, dim=2))
                ],
                dim=2,
            )
        x = unpatchify(x, self._patch).float().clamp(-1, 1)
        return x, CodecState(state.count + z.shape[2], tuple(features))

    def _features(self, state: CodecState, side: str) -> list[Any]:
        """A list of our own: the autoencoder replaces its entries and never writes into them."""
        return list(state.features) or [None] * self.vae._cached_conv_counts[side]


def make_codec(settings: CodecSettings, *, device: torch.device | str = "cpu") -> VisualCodec:
    """The codec that the settings name.

    Raises:
        SourceUnavailableError: no weights there.
        MemerError: the weights' sizes differ from the settings.
    """
    if settings.kind == "patch":
        return PatchCodec(settings.spatial_ratio, mean=settings.mean, std=settings.std)
    codec = WanCodec.from_pretrained(settings.weights, device=device)
    for name in ("spatial_ratio", "channels"):
        found, expected = getattr(codec, name), getattr(settings, name)
        if found != expected:
            raise MemerError(f"codec {settings.weights}: {name} is {found}, the contract says {expected}")
    return codec


def plan_psnr(decoded: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of frames in [-1, 1], dB per frame.

    Args:
        decoded: float32[B, 3, N, H, W].
        truth: of the same shape.

    Returns:
        float32[B, N], at most 100.
    """
    error = (decoded.float() - truth.float()).square().mean(dim=(1, 3, 4))
    return 10 * (math.log10(4.0) - error.clamp_min(4e-10).log10())
