"""A run, its steps and its evaluation."""

from pydantic import Field

from dseekjax.section import Section


class RunConfig(Section):
    dir: str = Field("runs/default", min_length=1, description="Folder of the run; an existing run is resumed.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of parameters, data order and dropout.")
    virtual_devices: int = Field(
        0, ge=0, description="Run on this many virtual CPU devices instead of what the machine has; 0 is off."
    )
    tune_cpu: bool = Field(
        True,
        description="On CPU, tell XLA and the memory allocator what was measured to be fastest; false leaves both as "
        "they come.",
    )
    compilation_cache_dir: str | None = Field(
        "~/.cache/dseekjax/programs",
        description="Where compiled programs are kept for the next run; null is nowhere, and JAX_COMPILATION_CACHE_DIR "
        "goes before it.",
    )
    profile_steps: int = Field(0, ge=0, description="Steps to trace into run.dir/profile, from the third on; 0 is off.")
    peak_flops_per_device: float | None = Field(
        None, gt=0, description="Peak FLOP/s of one device, for mfu; null takes it from a table of GPUs."
    )


class TrainConfig(Section):
    steps: int = Field(1000, gt=0, description="Optimizer steps of the whole run.")
    global_batch_size: int = Field(
        16, gt=0, lt=2**31, description="Sequences per step, over all devices and microbatches."
    )
    num_microbatches: int = Field(1, gt=0, description="Parts that a step's batch is worked through in.")
    max_bad_steps: int = Field(
        10, gt=0, description="Steps in a row with a non-finite loss or gradient that stop a run."
    )
    initialize_from: str | None = Field(
        None, description="Run directory whose parameters a new run starts from; null starts at random."
    )


class EvaluationConfig(Section):
    every_steps: int = Field(500, gt=0, description="Steps between evaluations; the last step is always evaluated.")
    max_batches: int | None = Field(None, gt=0, description="Batches of an evaluation; null is all that there are.")
