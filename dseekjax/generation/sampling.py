"""Which token comes next."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dseekjax.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the model's distribution."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Draw from this many most likely tokens (Fan et al. 2018, arXiv:1805.04833), and those that are as likely as the
    last of them; None from all."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens that have this probability together (Holtzman et al. 2020,
    arXiv:1904.09751), and those as likely as the last of them, after `top_k`; None from all."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature} is no number from 0 up; 0 takes the most likely token")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k} leaves no token to draw from; give 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is no probability; give a number above 0, up to 1, or leave it out")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed {self.seed} is no number from 0 to 2^31; give one")


def sample(
    logits: Float[Array, "batch vocab"], texts: Int[Array, "batch"], number: Int[Array, ""], sampling: Sampling
) -> Int[Array, "batch"]:
    """Draws the next token of each text.

    Args:
        logits: of the token that comes next.
        texts: number of each text: what is drawn for it does not depend on the texts beside it.
        number: of the token within the text.
        sampling: how to draw.
    """
    if sampling.temperature == 0:
        return _most_likely(logits)
    return _draw(logits, texts, number, sampling.seed, _float32(sampling.temperature), sampling.top_k, sampling.top_p)


@jax.jit
def _most_likely(logits: Float[Array, "batch vocab"]) -> Int[Array, "batch"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


# What seed and temperature are is no reason to compile again.
@functools.partial(jax.jit, static_argnums=(5, 6))
def _draw(
    logits: Float[Array, "batch vocab"],
    texts: Int[Array, "batch"],
    number: Int[Array, ""],
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Int[Array, "batch"]:
    key = jax.random.key(seed)
    keys = jax.vmap(lambda text: jax.random.fold_in(jax.random.fold_in(key, text), number))(texts)
    # The largest is 0 whatever the temperature, and what becomes infinite is no longer likely.
    sharpened = (logits - logits.max(-1, keepdims=True)) / temperature
    return jax.vmap(jax.random.categorical)(keys, restrict(sharpened, top_k, top_p)).astype(jnp.int32)


def restrict(
    logits: Float[Array, "batch vocab"], top_k: int | None = None, top_p: float | None = None
) -> Float[Array, "batch vocab"]:
    """-inf for the tokens that `top_k` and `top_p` leave out; those as likely as the last that is kept are kept too."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        least = jnp.min(jnp.where(before < _float32(top_p), ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def _float32(number: float) -> float:
    """The nearest that is neither 0 nor infinite in float32."""
    limits = jnp.finfo(jnp.float32)
    return min(max(number, float(limits.tiny)), float(limits.max))
