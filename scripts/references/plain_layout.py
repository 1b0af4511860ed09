"""The package's GPT-2 parameters in the layout of `plain_step`."""


def plain_parameters(params):
    """The same arrays under the other names, layer by layer."""
    run = params["runs"][0]

    def layer(i):
        attention = {
            f"{name[0]}_{part}": run["attention"][name][part][i]
            for name in ("query", "key", "value", "output")
            for part in ("kernel", "bias")
        }
        feed_forward = {
            f"{name}_{part}": run["feed_forward"][name][part][i]
            for name in ("up", "down")
            for part in ("kernel", "bias")
        }
        norms = {
            new: {part: run[old][part][i] for part in ("scale", "bias")}
            for new, old in (("norm1", "attention_norm"), ("norm2", "feed_forward_norm"))
        }
        return {**attention, **feed_forward, **norms}

    return {
        "tokens": params["token_embedding"]["embedding"],
        "positions": params["position_embedding"]["embedding"],
        "final_norm": params["final_norm"],
        "layers": [layer(i) for i in range(run["attention"]["query"]["kernel"].shape[0])],
    }
