"""The trainings of reference.py: the differences from Hugging Face's defaults, by its names."""

from dataclasses import dataclass, field


@dataclass
class Case:
    name: str
    arguments: dict
    """The fields of TrainingArguments."""
    train: int
    """The number of samples: the first ones of the data set."""
    eval: int = 0
    precision: str = "f64"
    world_size: int = 1
    metric: str | None = None
    """`accuracy`, or a name for which the evaluations return the `metric_values` in turn."""
    metric_values: list = field(default_factory=list)
    early_stopping: dict | None = None
    """The arguments of EarlyStoppingCallback."""
    resume: dict | None = None
    """`from`: the step of this training's own checkpoint to resume from; `arguments`: those that change then."""

    def described(self):
        return {name: value for name, value in vars(self).items() if value not in (None, [])}

    def is_biased(self):
        """True if Hugging Face reads samples twice, leaves some out of an evaluation, gives those of a short batch more
        weight, or rounds (it smooths labels in f32)."""
        arguments = self.arguments
        batch = arguments["per_device_train_batch_size"] * self.world_size
        drop_last = arguments.get("dataloader_drop_last")
        alone = self.world_size * arguments.get("gradient_accumulation_steps", 1) == 1
        even = self.train % batch == 0 or drop_last or alone
        evaluated = self.eval % (arguments.get("per_device_eval_batch_size", 8) * self.world_size) == 0
        smooth = "label_smoothing_factor" in arguments
        return smooth or not even or not evaluated and (self.world_size > 1 or drop_last)


def evaluated(steps, **more):
    return dict(eval_strategy="steps", eval_steps=steps, **more)


def saved(steps, **more):
    return dict(save_strategy="steps", save_steps=steps, **more)


LOGGED = dict(logging_steps=1)
BY_EPOCH = dict(eval_strategy="epoch")
# Burn keeps these in f32, which represents powers of two exactly.
POWERS = dict(adam_beta1=0.5, adam_beta2=0.75, adam_epsilon=2**-10)


def line():
    sgd = dict(
        optim="sgd",
        learning_rate=0.1,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=1,
        save_strategy="no",
    )
    polynomial = dict(lr_scheduler_type="polynomial", lr_scheduler_kwargs=dict(power=2.0, lr_end=0.01), warmup_steps=2)
    best = LOGGED | evaluated(1) | saved(1, load_best_model_at_end=True, metric_for_best_model="acc")
    few = dict(metric="acc", metric_values=[0.1, 0.5, 0.3, 0.2, 0.4, 0.45])
    patient = LOGGED | evaluated(1, metric_for_best_model="acc")
    half = dict(metric="acc", metric_values=[0.1, 0.5, 0.5, 0.6, 0.59, 0.58, 0.57, 0.56, 0.55, 0.54])
    steady = dict(metric="acc", metric_values=[0.1, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9])
    resumed = saved(3, num_train_epochs=3, logging_steps=2)
    late = dict(logging_steps=5)
    many = dict(per_device_train_batch_size=64)
    stop = lambda patience, threshold: dict(early_stopping_patience=patience, early_stopping_threshold=threshold)
    return [
        Case("log 2", sgd | dict(logging_steps=2), 20),
        Case("accumulate 2", sgd | LOGGED | dict(num_train_epochs=2, gradient_accumulation_steps=2), 20),
        Case("drop last", sgd | LOGGED | dict(gradient_accumulation_steps=2, dataloader_drop_last=True), 22),
        Case("max steps", sgd | evaluated(3) | saved(4, max_steps=7, logging_steps=3), 20, 8),
        Case("epochs 1.5", sgd | BY_EPOCH | dict(num_train_epochs=1.5, logging_strategy="epoch"), 20, 8),
        Case("log first", sgd | dict(warmup_steps=3, logging_steps=100, logging_first_step=True), 40),
        Case("cosine", sgd | LOGGED | dict(lr_scheduler_type="cosine", warmup_steps=0.25), 40),
        Case("constant", sgd | LOGGED | dict(lr_scheduler_type="constant_with_warmup", warmup_steps=4), 40),
        Case("polynomial", sgd | LOGGED | polynomial, 40),
        Case("fractions", sgd | evaluated(0.25) | saved(0.5, num_train_epochs=2, logging_steps=0.1), 40, 8),
        Case("clip 0.5", sgd | LOGGED | dict(max_grad_norm=0.5), 8),
        Case("no clip", sgd | LOGGED | dict(max_grad_norm=0.0), 8),
        Case("limit 2", sgd | best | dict(save_total_limit=2), 24, 8, **few),
        Case("limit 1", sgd | best | dict(save_total_limit=1), 24, 8, **few),
        Case("patience 2", sgd | patient, 40, 8, early_stopping=stop(2, 0.0), **half),
        Case("threshold 0.1", sgd | patient, 40, 8, early_stopping=stop(3, 0.1), **steady),
        Case(
            "two ranks",
            sgd | LOGGED | evaluated(2, gradient_accumulation_steps=2, per_device_eval_batch_size=2),
            22,
            7,
            world_size=2,
        ),
        Case("resume from 3", sgd | resumed, 20, resume={"from": 3, "arguments": late}),
        Case("resume from 6", sgd | resumed, 20, resume={"from": 6, "arguments": late}),
        Case("many", sgd | many, 60000),
        Case("many, two ranks", sgd | many, 60000, world_size=2),
        Case("many, eight ranks", sgd | many, 60000, world_size=8),
        Case("delay", sgd | LOGGED | evaluated(2, eval_delay=3), 20, 8),
        Case("eval on start", sgd | LOGGED | BY_EPOCH | dict(eval_on_start=True), 20, 8),
    ]


def tokens():
    """One update of two samples, with three tokens and with one."""
    return dict(
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
    )


def transformer():
    common = LOGGED | dict(
        per_device_train_batch_size=4, per_device_eval_batch_size=8, num_train_epochs=2, save_strategy="no"
    )
    sgd = common | dict(optim="sgd", learning_rate=0.25)
    defaults = common | dict(optim="adamw_torch", learning_rate=0.01)
    adamw = defaults | POWERS
    cosine = dict(lr_scheduler_type="cosine", warmup_steps=0.25)
    polynomial = dict(lr_scheduler_type="polynomial", lr_scheduler_kwargs=dict(power=2.0, lr_end=0.01), max_grad_norm=0.5)
    restarts = dict(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs=dict(num_cycles=2), warmup_steps=2)
    inverse = dict(lr_scheduler_type="inverse_sqrt", warmup_steps=4)
    constant = dict(lr_scheduler_type="constant_with_warmup", warmup_steps=3)
    drop_last = dict(dataloader_drop_last=True)
    accumulate = lambda steps: dict(gradient_accumulation_steps=steps)
    decay = dict(weight_decay=0.125)
    best = dict(load_best_model_at_end=True)
    accuracy = dict(metric="accuracy")
    return [
        Case("sgd linear", sgd | BY_EPOCH, 40, 20, **accuracy),
        Case("sgd accumulate 2 cosine", sgd | accumulate(2) | cosine | evaluated(4, eval_delay=5, logging_steps=3), 44, 20),
        Case(
            "sgd accumulate 3 drop last polynomial",
            sgd | accumulate(3) | drop_last | polynomial | BY_EPOCH | dict(num_train_epochs=1.5, logging_steps=0.25),
            47,
            20,
        ),
        Case("sgd accumulate 2 short batch", sgd | accumulate(2) | BY_EPOCH, 46, 20),
        Case("adamw decay clip", adamw | decay | BY_EPOCH | dict(max_grad_norm=0.25, eval_delay=2), 40, 20, **accuracy),
        Case("adamw default betas", defaults | decay | BY_EPOCH | dict(learning_rate=0.0002), 40, 20),
        Case("adamw restarts no clip", adamw | restarts | evaluated(6, max_steps=15, max_grad_norm=0.0), 40, 20),
        Case("adamw inverse sqrt", adamw | inverse | evaluated(5), 40, 20),
        Case("adamw label smoothing", adamw | evaluated(5, label_smoothing_factor=0.125), 40, 20),
        Case(
            "sgd best by loss",
            sgd | constant | best | evaluated(2) | saved(2, save_total_limit=2, learning_rate=0.8, max_grad_norm=4.0),
            40,
            20,
        ),
        Case(
            "adamw best by accuracy",
            adamw
            | best
            | BY_EPOCH
            | dict(learning_rate=0.04, num_train_epochs=4, save_strategy="epoch", save_total_limit=1)
            | dict(metric_for_best_model="accuracy"),
            24,
            20,
            **accuracy,
        ),
        Case(
            "adamw resume from 4",
            adamw | accumulate(2) | cosine | evaluated(4) | saved(4),
            44,
            20,
            resume={"from": 4, "arguments": {}},
        ),
        Case("sgd two ranks", sgd | accumulate(2) | cosine | evaluated(3), 40, 16, world_size=2, **accuracy),
        Case("adamw two ranks short batch", adamw | decay | evaluated(4, warmup_steps=2), 42, 19, world_size=2, **accuracy),
        Case("sgd two ranks drop last", sgd | drop_last | BY_EPOCH, 46, 20, world_size=2),
    ]


def cnn():
    common = LOGGED | dict(
        per_device_train_batch_size=8, per_device_eval_batch_size=16, num_train_epochs=3, save_strategy="no"
    )
    sgd = common | dict(optim="sgd", learning_rate=0.1)
    defaults = common | dict(optim="adamw_torch", learning_rate=0.004)
    adamw = defaults | POWERS
    both = BY_EPOCH | dict(logging_strategy="epoch")
    least = dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=dict(min_lr_rate=0.125), warmup_steps=0.125)
    best = dict(save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="accuracy")
    polynomial = dict(lr_scheduler_type="polynomial", warmup_steps=2, max_grad_norm=0.5)
    stable = dict(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=dict(num_decay_steps=8), warmup_steps=4)
    accumulate = lambda steps: dict(gradient_accumulation_steps=steps)
    decay = dict(weight_decay=0.125)
    accuracy = dict(metric="accuracy")
    return [
        Case("sgd by epoch", sgd | both, 96, 40, **accuracy),
        Case("sgd by epoch f32", sgd | both, 96, 40, precision="f32", **accuracy),
        Case(
            "adamw best by accuracy", adamw | least | best | evaluated(6) | saved(6, learning_rate=0.02), 96, 40, **accuracy
        ),
        Case(
            "adamw accumulate 2 f32",
            defaults | accumulate(2) | decay | both | dict(warmup_steps=0.25),
            88,
            40,
            precision="f32",
            **accuracy,
        ),
        Case(
            "sgd accumulate 3 drop last",
            sgd | accumulate(3) | polynomial | BY_EPOCH | dict(dataloader_drop_last=True, num_train_epochs=2.5),
            94,
            32,
            **accuracy,
        ),
        Case(
            "adamw max steps",
            adamw
            | decay
            | evaluated(0.4, eval_on_start=True)
            | dict(lr_scheduler_type="constant", max_steps=20, logging_steps=0.3, logging_first_step=True),
            96,
            40,
            **accuracy,
        ),
        Case("sgd warmup stable decay f32", sgd | stable | BY_EPOCH, 80, 40, precision="f32"),
        Case(
            "sgd two ranks cosine",
            sgd | BY_EPOCH | dict(lr_scheduler_type="cosine", max_grad_norm=0.5),
            96,
            32,
            world_size=2,
            **accuracy,
        ),
        Case(
            "adamw two ranks short batch f32",
            # With the default, a gradient of almost 0 would cause a step of the size of its rounding.
            defaults | accumulate(2) | BY_EPOCH | dict(adam_epsilon=2**-10),
            92,
            37,
            world_size=2,
            precision="f32",
            **accuracy,
        ),
    ]
