"""Keys and values of tokens that were seen, so that the next token need not compute them again."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeysValues:
    """Of one layer, a slot per token; heads lie apart, so that one query reads what it sees in one stretch."""

    keys: Float[Array, "batch kv_heads slots head_dim"]
    values: Float[Array, "batch kv_heads slots head_dim"]

    @classmethod
    def of(
        cls, key: Float[Array, "batch seq kv_heads head_dim"], value: Float[Array, "batch seq kv_heads head_dim"]
    ) -> "KeysValues":
        """What attention is given, to be kept."""
        return cls(key.swapaxes(1, 2), value.swapaxes(1, 2))

    def write(self, new: "KeysValues", slot: Int[Array, ""]) -> "KeysValues":
        """These with `new` in the slots from `slot` on."""
        write = jax.lax.dynamic_update_slice_in_dim
        return KeysValues(write(self.keys, new.keys, slot, axis=2), write(self.values, new.values, slot, axis=2))

    def for_attention(self) -> tuple[Float[Array, "batch slots kv_heads head_dim"], ...]:
        """Keys and values as attention takes them."""
        return self.keys.swapaxes(1, 2), self.values.swapaxes(1, 2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """What one layer is given of the tokens before the one that comes now."""

    past: KeysValues
    slot: Int[Array, ""]
    """Where the token that comes now goes."""
    segment_ids: Int[Array, "batch slots"]
    """Number of the document in each slot, that token included; 0 is padding or free."""
