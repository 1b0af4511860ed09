"""The model `dseekjax` of EleutherAI's lm-eval. Needs the extra `lm-eval`.

    python -m dseekjax.evaluation.lm_eval run --model dseekjax --model_args run=runs/quickstart --tasks …

is lm-eval's own command with this model known to it. In Python, `DseekjaxLM(run="runs/quickstart")` goes into
`lm_eval.simple_evaluate`.
"""

import logging
import sys
from typing import Any

from dseekjax.errors import UserError
from dseekjax.evaluation.likelihood import log_likelihood, log_likelihood_rolling
from dseekjax.trained import open_trained

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise UserError("lm-eval is missing; install it with `pip install 'dseekjax[lm-eval]'`") from error

logger = logging.getLogger(__name__)


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
        """Raises UserError: this model does not generate for lm-eval yet."""
        raise UserError(
            "the model dseekjax scores texts for lm-eval and does not generate yet; choose tasks of multiple choice or "
            "perplexity"
        )

    def _kept[Answer](self, method: str, requests: list[Any], answers: list[Answer]) -> list[Answer]:
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(method, request.args, answer)
        return answers


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
