"""The model `dseekjax` of EleutherAI's lm-eval. Needs the extra `lm-eval`.

    python -m dseekjax.evaluation.lm_eval run --model dseekjax --model_args run=runs/quickstart --tasks …

is lm-eval's own command with this model known to it. In Python, `DseekjaxLM(run="runs/quickstart")` goes into
`lm_eval.simple_evaluate`.
"""

import itertools
import logging
import sys
from functools import cached_property
from typing import Any

from dseekjax.errors import UserError
from dseekjax.evaluation.likelihood import log_likelihood, log_likelihood_rolling
from dseekjax.generation.complete import Writer
from dseekjax.generation.sampling import Sampling
from dseekjax.trained import open_trained

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise UserError("lm-eval is missing; install it with `pip install 'dseekjax[lm-eval]'`") from error

logger = logging.getLogger(__name__)
MAX_TOKENS = 256
"""Written where a task does not say how many, as lm-eval's own models do."""
MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What lm-eval's own models take for it, or its tasks write."""
CHANGE_NOTHING = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "early_stopping": False,
}
"""Options of Hugging Face that there is no counterpart of here, with the values that leave them out."""


@register_model("dseekjax")
class DseekjaxLM(LM):
    """A run's newest checkpoint."""

    def __init__(
        self,
        run: str,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **overrides: Any,
    ) -> None:
        """
        Args:
            run: folder of the run.
            batch_size: given by lm-eval's command and not used: a batch is of `train.global_batch_size` sequences.
            max_batch_size: likewise.
            device: likewise: the mesh says which devices are used.
            overrides: keys of the config and their values, as in `mesh.data=2`.
        """
        super().__init__()
        keys = [f"{key}={value}" for key, value in overrides.items()]
        self._trained = open_trained(run, keys, tell=logger.warning)

    @property
    def tokenizer_name(self) -> str:
        """Tells the requests of this run from those of others, where lm-eval keeps them."""
        return str(self._trained.path.absolute())

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See `dseekjax.evaluation.likelihood.log_likelihood`."""
        found = log_likelihood(self._trained, [request.args for request in requests], tell=logger.warning)
        return self._kept("loglikelihood", requests, [(each.log_probability, each.is_greedy) for each in found])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See `dseekjax.evaluation.likelihood.log_likelihood_rolling`."""
        found = log_likelihood_rolling(self._trained, [request.args[0] for request in requests])
        return self._kept("loglikelihood_rolling", requests, [each.log_probability for each in found])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues each context until one of its stop strings; a context that is too long loses its beginning."""
        found: list[str] = []
        for _, alike in itertools.groupby(requests, key=lambda request: repr(request.args[1])):
            some = list(alike)
            options = dict(some[0].args[1])
            until, most = options.pop("until", None) or [], _max_tokens(options)
            stop = [text for text in ([until] if isinstance(until, str) else until) if text]
            contexts = self._encoded([request.args[0] for request in some], most)
            texts = self._writer.complete(contexts, max_tokens=most, stop=stop, sampling=_sampling(options))
            found += [completion.text for completion in texts]
        return self._kept("generate_until", requests, found)

    @cached_property
    def _writer(self) -> Writer:
        return Writer(self._trained)

    def _encoded(self, contexts: list[str], most: int) -> list[list[int]]:
        """Tokens of contexts, of which the last are kept where they leave no room for what is to be written.

        For that there is half of what the model takes, if so much is asked for.
        """
        begin, limit = list(self._trained.begin_tokens), self._writer.context
        room = limit - len(begin) - min(most, limit // 2)
        tokenizer, cut, encoded = self._trained.tokenizer, 0, []
        for context in contexts:
            tokens = tokenizer.encode(context, add_special_tokens=False).ids
            cut += len(tokens) > room
            encoded.append(begin + tokens[-room:] or [self._trained.end_token])
        if cut:
            logger.warning("%d contexts of %d lost their beginning, to leave room for an answer", cut, len(contexts))
        return encoded

    def _kept[Answer](self, method: str, requests: list[Any], answers: list[Answer]) -> list[Answer]:
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(method, request.args, answer)
        return answers


def _max_tokens(options: dict[str, Any]) -> int:
    """Most tokens to write, by the first of the names for it that is given."""
    given = [options.pop(name, None) for name in MAX_TOKENS_NAMES]
    return int(next((number for number in given if number is not None), MAX_TOKENS))


def _sampling(options: dict[str, Any]) -> Sampling:
    """How tokens are drawn, from what a task says in the words of Hugging Face."""
    temperature = options.pop("temperature", None)
    draws = options.pop("do_sample", bool(temperature))
    # Nothing is said by 0 of top_k, and by None of any.
    top_k, top_p = (options.pop(name, None) or None for name in ("top_k", "top_p"))
    for name, value in CHANGE_NOTHING.items():
        if options.get(name) in (None, value):
            options.pop(name, None)
    sampling = Sampling(float(1.0 if temperature is None else temperature) if draws else 0.0, top_k, top_p)
    if options:
        raise UserError(
            f"generation_kwargs has {', '.join(sorted(options))}, which the model dseekjax does not know; it takes "
            f"until, {', '.join(MAX_TOKENS_NAMES)}, do_sample, temperature, top_k and top_p, and what changes nothing, "
            "as num_beams 1"
        )
    return sampling


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
