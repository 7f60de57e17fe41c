//! Finds contradictions between arguments before the first step.

use super::{
    FsdpStrategy, IntervalStrategy, OptimizerName, ReportTo, SaveStrategy, TrainSamplingStrategy,
    TrainingArguments,
};
use crate::core::error::{Error, Result};
use crate::reduce::Compression;
use crate::train::rates::LrSchedulerType;
use accelerator_plan::TailPolicy;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::train) enum EvalData {
    Absent,
    Present,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::train) enum OptimizerOrigin {
    Arguments,
    Program,
}

pub(in crate::train) fn check(
    arguments: &TrainingArguments,
    eval: EvalData,
    optimizer: OptimizerOrigin,
) -> Result<()> {
    let mut found = Contradictions(Vec::new());
    found.numbers(arguments);
    found.intervals(arguments);
    found.evaluation(arguments, eval);
    found.optimizer(arguments, optimizer);
    found.schedule(arguments);
    found.others(arguments);
    match &*found.0 {
        [] => Ok(()),
        [one] => Err(Error::config(format!("training arguments: {one}"))),
        several => Err(Error::config(format!(
            "training arguments: {} contradictions:\n- {}",
            several.len(),
            several.join("\n- ")
        ))),
    }
}

struct Contradictions(Vec<String>);

impl Contradictions {
    fn expect(&mut self, holds: bool, text: impl FnOnce() -> String) {
        if !holds {
            self.0.push(text());
        }
    }

    fn numbers(&mut self, a: &TrainingArguments) {
        let counts = [
            ("per_device_train_batch_size", a.per_device_train_batch_size),
            ("per_device_eval_batch_size", a.per_device_eval_batch_size),
            ("gradient_accumulation_steps", a.gradient_accumulation_steps),
            ("save_total_limit", a.save_total_limit.unwrap_or(1)),
        ];
        for (name, count) in counts {
            self.expect(count > 0, || format!("{name} is 0; expected at least 1"));
        }
        let at_least_zero = [
            ("learning_rate", a.learning_rate),
            ("weight_decay", a.weight_decay),
            ("adam_epsilon", a.adam_epsilon),
            ("max_grad_norm", a.max_grad_norm),
            ("num_train_epochs", a.num_train_epochs),
            ("warmup_steps", a.warmup_steps),
            ("eval_delay", a.eval_delay),
            ("early_stopping_threshold", a.early_stopping_threshold),
        ];
        for (name, number) in at_least_zero {
            let holds = number.is_finite() && number >= 0.0;
            self.expect(holds, || format!("{name} is {number}; expected 0 or more"));
        }
        for (name, rate) in [
            ("adam_beta1", a.adam_beta1),
            ("adam_beta2", a.adam_beta2),
            ("momentum", a.momentum),
            ("ema_decay", a.ema_decay.unwrap_or(0.0)),
        ] {
            let holds = (0.0..1.0).contains(&rate);
            self.expect(holds, || {
                format!("{name} is {rate}; expected 0 to less than 1")
            });
        }
        let (steps, ratio) = (a.max_steps, a.warmup_ratio);
        self.expect(steps >= -1, || {
            format!("max_steps is {steps}; expected a number of updates, or -1 to go by epochs")
        });
        self.expect((0.0..=1.0).contains(&ratio), || {
            format!("warmup_ratio is {ratio}; expected 0 to 1, or warmup_steps")
        });
        let warmup = a.warmup_steps;
        self.expect(warmup < 1.0 || warmup.fract() == 0.0, || {
            format!("warmup_steps is {warmup}; expected a whole number, or a share below 1")
        });
        for (name, every) in [
            ("early_stopping_patience", a.early_stopping_patience),
            ("check_replicas_steps", a.check_replicas_steps),
            ("local_sgd_steps", a.local_sgd_steps),
        ] {
            self.expect(every != Some(0), || {
                format!("{name} is 0; expected at least 1")
            });
        }
    }

    fn intervals(&mut self, a: &TrainingArguments) {
        for (name, is_used, steps) in [
            (
                "logging_steps",
                a.logging_strategy == IntervalStrategy::Steps,
                a.logging_steps,
            ),
            (
                "eval_steps",
                a.eval_strategy == IntervalStrategy::Steps,
                a.eval_steps.unwrap_or(1.0),
            ),
            (
                "save_steps",
                a.save_strategy == SaveStrategy::Steps,
                a.save_steps,
            ),
        ] {
            let is_whole = steps >= 1.0 && steps.fract() == 0.0 && steps.is_finite();
            let is_share = steps > 0.0 && steps < 1.0;
            self.expect(!is_used || is_whole || is_share, || {
                format!(
                    "{name} is {steps}; expected a whole number of updates, a share of all below 1, or another \
                     {}_strategy",
                    name.trim_end_matches("_steps")
                )
            });
        }
    }

    fn evaluation(&mut self, a: &TrainingArguments, eval: EvalData) {
        let evaluates = a.eval_strategy != IntervalStrategy::No;
        if eval == EvalData::Absent {
            for (name, is_on) in [
                ("eval_strategy", evaluates),
                ("eval_on_start", a.eval_on_start),
                ("metric_for_best_model", a.metric_for_best_model.is_some()),
            ] {
                self.expect(!is_on, || {
                    format!("{name} is set, and there is no evaluation data: pass `eval_dataset`")
                });
            }
        }
        let by_steps = a.eval_strategy == IntervalStrategy::Steps;
        self.expect(a.eval_steps.is_none() || by_steps, || {
            format!(
                "eval_steps is set with eval_strategy {}: it is for steps",
                a.eval_strategy
            )
        });
        self.expect(a.eval_delay == 0.0 || evaluates, || {
            "eval_delay is set without evaluations: set eval_strategy to steps or epoch".to_owned()
        });
        let has_best = a.best_metric().is_some();
        self.expect(a.greater_is_better.is_none() || has_best, || {
            "greater_is_better is set, and nothing is compared: set metric_for_best_model"
                .to_owned()
        });
        let has_patience = a.early_stopping_patience.is_some();
        self.expect(a.early_stopping_threshold == 0.0 || has_patience, || {
            "early_stopping_threshold is set without early_stopping_patience".to_owned()
        });
        for (name, is_on) in [
            ("load_best_model_at_end", a.load_best_model_at_end),
            (
                "save_strategy \"best\"",
                a.save_strategy == SaveStrategy::Best,
            ),
            (
                "early_stopping_patience",
                a.early_stopping_patience.is_some(),
            ),
            (
                "metric_for_best_model",
                eval == EvalData::Present && a.metric_for_best_model.is_some(),
            ),
        ] {
            self.expect(!is_on || evaluates, || {
                format!("{name} needs evaluations: set eval_strategy to steps or epoch")
            });
        }
        if a.load_best_model_at_end && evaluates {
            self.checkpoint_of_each_evaluation(a);
        }
    }

    /// The best weights are those of a checkpoint.
    fn checkpoint_of_each_evaluation(&mut self, a: &TrainingArguments) {
        match (a.eval_strategy, a.save_strategy) {
            (_, SaveStrategy::Best) | (IntervalStrategy::Epoch, SaveStrategy::Epoch) => {}
            (IntervalStrategy::Steps, SaveStrategy::Steps) => {
                let (save, eval) = (a.save_steps, a.eval_steps.unwrap_or(a.logging_steps));
                let times = save / eval;
                // Shares come to whole numbers of updates later.
                let is_multiple = match save < 1.0 || eval < 1.0 {
                    true => (times - times.round()).abs() < 1e-9 && (save < 1.0) == (eval < 1.0),
                    false => save % eval == 0.0,
                };
                self.expect(is_multiple, || {
                    format!(
                        "load_best_model_at_end needs a checkpoint at evaluations, and save_steps {save} is no \
                         multiple of eval_steps {eval}: set save_steps to one, or save_strategy to best"
                    )
                });
            }
            (eval, save) => self.0.push(format!(
                "load_best_model_at_end needs a checkpoint at each evaluation, and eval_strategy is {eval} with \
                 save_strategy {save}: set both alike, or save_strategy to best"
            )),
        }
    }

    /// Rejects arguments of an optimizer that is not in use, since nothing reads them.
    fn optimizer(&mut self, a: &TrainingArguments, origin: OptimizerOrigin) {
        let default = TrainingArguments::default();
        let sgd = [("momentum", a.momentum != default.momentum)];
        let adamw = [
            ("adam_beta1", a.adam_beta1 != default.adam_beta1),
            ("adam_beta2", a.adam_beta2 != default.adam_beta2),
            ("adam_epsilon", a.adam_epsilon != default.adam_epsilon),
        ];
        if origin == OptimizerOrigin::Program {
            let all = [
                ("optim", a.optim != default.optim),
                ("weight_decay", a.weight_decay != default.weight_decay),
            ];
            for (name, is_set) in all.into_iter().chain(sgd).chain(adamw) {
                self.expect(!is_set, || {
                    format!(
                        "{name} is set, and the program has an optimizer of its own: leave it out"
                    )
                });
            }
            return;
        }
        let (others, whose) = match a.optim {
            OptimizerName::Sgd => (&adamw[..], "AdamW"),
            OptimizerName::AdamWTorch | OptimizerName::AdamWTorchFused => (&sgd[..], "sgd"),
        };
        for (name, is_set) in others {
            self.expect(!is_set, || {
                format!("{name} is set with optim {}: it is for {whose}", a.optim)
            });
        }
    }

    fn schedule(&mut self, a: &TrainingArguments) {
        let (kind, kwargs) = (a.lr_scheduler_type, a.lr_scheduler_kwargs);
        for name in kwargs.set_but_unused(kind) {
            self.expect(false, || {
                format!("lr_scheduler_kwargs.{name} is set, and lr_scheduler_type {kind} does not take it")
            });
        }
        let both = kwargs.min_lr.is_some() && kwargs.min_lr_rate.is_some();
        self.expect(!both, || {
            "lr_scheduler_kwargs has min_lr and min_lr_rate: choose one".to_owned()
        });
        if let (LrSchedulerType::Polynomial, Some(end)) = (kind, kwargs.lr_end) {
            let rate = a.learning_rate;
            self.expect(end < rate, || {
                format!(
                    "lr_scheduler_kwargs.lr_end is {end}; expected less than learning_rate {rate}"
                )
            });
        }
        for (name, warmup) in [
            ("warmup_steps", a.warmup_steps),
            ("warmup_ratio", a.warmup_ratio),
        ] {
            self.expect(warmup == 0.0 || kind != LrSchedulerType::Constant, || {
                format!(
                    "{name} is set with lr_scheduler_type constant: choose constant_with_warmup"
                )
            });
        }
    }

    fn others(&mut self, a: &TrainingArguments) {
        let saves = a.save_strategy != SaveStrategy::No;
        for (name, is_set) in [
            ("save_total_limit", a.save_total_limit.is_some()),
            ("save_without_frozen", a.save_without_frozen),
        ] {
            self.expect(saves || !is_set, || {
                format!(
                    "{name} is set with save_strategy no: set save_strategy to steps, epoch or best"
                )
            });
        }
        self.expect(!(a.bf16 && a.fp16), || {
            "bf16 and fp16 are both set: choose one".to_owned()
        });
        self.expect(
            !a.dataloader_drop_last || a.tail == TailPolicy::Exact,
            || {
                format!(
                    "dataloader_drop_last is set with tail {}: leave one of them out",
                    a.tail
                )
            },
        );
        self.expect(a.tail != TailPolicy::Uneven, || {
            "tail is uneven, which is for evaluation: choose exact, pad or drop".to_owned()
        });
        let shuffles = a.train_sampling_strategy == TrainSamplingStrategy::Random;
        self.expect(a.data_seed.is_none() || shuffles, || {
            format!(
                "data_seed is set with train_sampling_strategy {}: it is for random",
                a.train_sampling_strategy
            )
        });
        let compresses = a.gradient_compression != Compression::None;
        self.expect(!compresses || a.local_sgd_steps.is_none(), || {
            "gradient_compression is set with local_sgd_steps, with which no gradients travel: leave one of them out"
                .to_owned()
        });
        let is_sharded = a.fsdp == FsdpStrategy::FullShard;
        self.expect(!is_sharded || !a.sharded_optimizer, || {
            "fsdp is full_shard with sharded_optimizer: it already shards the optimizer's state, so leave sharded_optimizer out".to_owned()
        });
        for (name, is_set) in [
            ("fsdp", is_sharded),
            ("sharded_optimizer", a.sharded_optimizer),
            ("ema_decay", a.ema_decay.is_some()),
            ("check_replicas_steps", a.check_replicas_steps.is_some()),
        ] {
            self.expect(!is_set || a.local_sgd_steps.is_none(), || {
                format!(
                    "{name} is set with local_sgd_steps, with which ranks have other weights between averages: \
                     leave one of them out"
                )
            });
        }
        for (at, word) in a.report_to.iter().enumerate() {
            let is_first = !a.report_to[..at].contains(word);
            self.expect(is_first, || format!("report_to has {word} twice"));
        }
        let has_run = a.report_to.iter().any(|word| *word != ReportTo::None);
        self.expect(!has_run || !a.report_to.contains(&ReportTo::None), || {
            "report_to has none beside others: leave it out".to_owned()
        });
        self.expect(a.run_name.is_none() || has_run, || {
            "run_name is set, and no run is recorded: set report_to".to_owned()
        });
        let has_mlflow = cfg!(feature = "mlflow");
        self.expect(
            has_mlflow || !a.report_to.contains(&ReportTo::Mlflow),
            || "report_to has mlflow: build burn-accelerate with its feature `mlflow`".to_owned(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(arguments: &TrainingArguments, eval: EvalData) -> Result<()> {
        check(arguments, eval, OptimizerOrigin::Arguments)
    }

    fn refused(change: impl FnOnce(&mut TrainingArguments)) -> String {
        let mut arguments = TrainingArguments::default();
        change(&mut arguments);
        checked(&arguments, EvalData::Present)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn defaults_contradict_nothing() {
        for eval in [EvalData::Absent, EvalData::Present] {
            checked(&TrainingArguments::default(), eval).unwrap();
        }
    }

    #[test]
    fn all_contradictions_are_said_at_once() {
        let text = refused(|a| {
            (a.bf16, a.fp16) = (true, true);
            a.logging_steps = 2.5;
            a.gradient_accumulation_steps = 0;
        });
        for part in [
            "3 contradictions",
            "bf16 and fp16",
            "logging_steps is 2.5",
            "accumulation_steps is 0",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn evaluations_need_data_and_the_best_needs_evaluations() {
        let arguments = TrainingArguments {
            eval_strategy: IntervalStrategy::Epoch,
            ..TrainingArguments::default()
        };
        let error = checked(&arguments, EvalData::Absent).unwrap_err();
        assert!(error.to_string().contains("`eval_dataset`"), "{error}");
        checked(&arguments, EvalData::Present).unwrap();

        assert!(refused(|a| a.load_best_model_at_end = true).contains("eval_strategy"));
        assert!(refused(|a| a.early_stopping_patience = Some(2)).contains("eval_strategy"));
        let text = refused(|a| {
            a.load_best_model_at_end = true;
            a.eval_strategy = IntervalStrategy::Epoch;
        });
        assert!(text.contains("set both alike"), "{text}");
        let text = refused(|a| {
            a.load_best_model_at_end = true;
            a.eval_strategy = IntervalStrategy::Steps;
            a.eval_steps = Some(3.0);
            a.save_steps = 4.0;
        });
        assert!(text.contains("no multiple of eval_steps 3"), "{text}");
    }

    #[test]
    fn an_argument_that_nothing_uses_is_refused() {
        let cases = [
            (
                r#"adam_beta1 = 0.8, optim = "sgd""#,
                "adam_beta1 is set with optim sgd",
            ),
            (
                "momentum = 0.9",
                "momentum is set with optim adamw_torch_fused",
            ),
            (
                r#"data_seed = 3, train_sampling_strategy = "sequential""#,
                "data_seed",
            ),
            ("eval_steps = 3", "eval_steps is set with eval_strategy no"),
            (
                r#"eval_steps = 3, eval_strategy = "epoch""#,
                "it is for steps",
            ),
            ("eval_delay = 3", "eval_delay is set without evaluations"),
            ("greater_is_better = true", "set metric_for_best_model"),
            (
                r#"metric_for_best_model = "accuracy""#,
                "metric_for_best_model needs evaluations",
            ),
            (
                r#"save_strategy = "no", save_total_limit = 2"#,
                "save_total_limit is set with save_strategy no",
            ),
            (
                "early_stopping_threshold = 0.1",
                "without early_stopping_patience",
            ),
            (r#"run_name = "a""#, "set report_to"),
            (r#"report_to = ["none", "csv"]"#, "none beside others"),
            (
                r#"lr_scheduler_type = "constant", warmup_ratio = 0.1"#,
                "constant_with_warmup",
            ),
            (
                r#"lr_scheduler_kwargs = { power = 2 }"#,
                "linear does not take it",
            ),
            (
                r#"lr_scheduler_type = "cosine_with_min_lr", lr_scheduler_kwargs = { min_lr = 0, min_lr_rate = 0.1 }"#,
                "choose one",
            ),
            (
                r#"gradient_compression = "bf16", local_sgd_steps = 4"#,
                "no gradients travel",
            ),
        ];
        for (text, expected) in cases {
            let given = toml::from_str::<toml::Table>(&format!("given = {{ {text} }}")).unwrap();
            let given = toml::to_string(&given["given"]).unwrap();
            let arguments = TrainingArguments::from_toml(&given).unwrap();
            let error = checked(&arguments, EvalData::Present).unwrap_err();
            assert!(error.is_config(), "{text}");
            assert!(error.to_string().contains(expected), "{text}: {error}");
        }
        let arguments = TrainingArguments {
            metric_for_best_model: Some("accuracy".to_owned()),
            weight_decay: 0.1,
            ..TrainingArguments::default()
        };
        let error = check(&arguments, EvalData::Absent, OptimizerOrigin::Program).unwrap_err();
        for part in [
            "metric_for_best_model",
            "weight_decay is set, and the program has",
        ] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn numbers_have_bounds() {
        assert!(refused(|a| a.warmup_steps = -1.0).contains("warmup_steps is -1"));
        assert!(refused(|a| a.learning_rate = f64::NAN).contains("learning_rate is NaN"));
        assert!(refused(|a| a.logging_steps = 0.0).contains("logging_steps is 0"));
        assert!(refused(|a| a.save_total_limit = Some(0)).contains("save_total_limit is 0"));
        assert!(refused(|a| a.max_steps = -2).contains("max_steps is -2"));
        let text = refused(|a| {
            a.lr_scheduler_type = LrSchedulerType::Polynomial;
            a.lr_scheduler_kwargs.lr_end = Some(1.0);
        });
        assert!(text.contains("lr_end is 1"), "{text}");
    }
}
