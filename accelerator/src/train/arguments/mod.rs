//! The arguments of a training, by Hugging Face's names.

#[cfg(feature = "clap")]
mod command_line;
mod contradictions;
mod file;
mod table;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use self::table::arguments;
use super::rates::{LrSchedulerKwargs, LrSchedulerType};
use super::words::{word, words};
use crate::accelerator::{Accelerator, AcceleratorBuilder};
use crate::core::device::Operations;
use crate::precision::Precision;
use crate::reduce::Compression;
use crate::unit::Units;
use accelerator_plan::TailPolicy;

pub(super) use self::contradictions::{EvalData, OptimizerOrigin, check};

arguments! {
    /// The arguments of a training, with the names and defaults of Hugging Face's `TrainingArguments`.
    ///
    /// They come from code, from a TOML or JSON file ([`from_file`](Self::from_file)), and with the feature `clap` from
    /// the command line: `#[command(flatten)]` gives a program a flag for each, `--learning-rate` or `--learning_rate`.
    /// Intervals and warm-ups below 1 are shares of all updates. What contradicts is an error before the first step,
    /// with all contradictions at once.
    ///
    /// ```
    /// use accelerator::train::{IntervalStrategy, TrainingArguments};
    ///
    /// let arguments = TrainingArguments {
    ///     learning_rate: 1e-3,
    ///     eval_strategy: IntervalStrategy::Epoch,
    ///     ..TrainingArguments::default()
    /// };
    /// assert_eq!((arguments.max_grad_norm, arguments.seed), (1.0, 42));
    ///
    /// let unknown = TrainingArguments::default().set("learning_rat", "0.1").unwrap_err();
    /// assert!(unknown.to_string().contains("did you mean \"learning_rate\"?"));
    /// ```
    pub struct TrainingArguments {
        /// The folder of the checkpoints.
        output_dir: PathBuf = "trainer_output".into(),
        /// Samples of a batch in training, on each rank.
        per_device_train_batch_size: usize = 8,
        /// Samples of a batch in evaluation, on each rank.
        per_device_eval_batch_size: usize = 8,
        /// Epochs to train; 1.5 ends in the middle of the second.
        num_train_epochs: f64 = 3.0,
        /// The number of updates, in place of epochs; -1: by epochs.
        max_steps: i64 = -1,
        /// Batches per update, on each rank; 1: as set on the accelerator or by `ACCEL_ACCUMULATION_STEPS`.
        gradient_accumulation_steps: usize = 1,
        /// Threads that read batches ahead.
        dataloader_num_workers: usize = 0,
        /// Leave out the samples that do not fill a batch of all ranks.
        dataloader_drop_last: bool = false,
        /// The order of samples: random, by `data_seed`, or sequential.
        train_sampling_strategy: TrainSamplingStrategy = TrainSamplingStrategy::Random,
        /// The handling of the last samples of an epoch: exact, pad or drop.
        #[serde(with = "word")]
        tail: TailPolicy = TailPolicy::Exact,

        /// The optimizer: adamw_torch_fused, adamw_torch or sgd.
        optim: OptimizerName = OptimizerName::AdamWTorchFused,
        /// The learning rate, which the schedule scales.
        learning_rate: f64 = 5e-5,
        /// The weight decay, of all parameters but biases and those of norms.
        weight_decay: f64 = 0.0,
        /// AdamW's first decay rate.
        adam_beta1: f64 = 0.9,
        /// AdamW's second decay rate.
        adam_beta2: f64 = 0.999,
        /// The number that AdamW adds to the denominator.
        adam_epsilon: f64 = 1e-8,
        /// The momentum of SGD.
        momentum: f64 = 0.0,
        /// The norm to which longer gradients are clipped; 0: none.
        max_grad_norm: f64 = 1.0,
        /// Share the optimizer's state out over the ranks (ZeRO, stage 1).
        sharded_optimizer: bool = false,
        /// Step each rank by its own gradients, and average the weights after so many updates (local SGD).
        local_sgd_steps: Option<u64> = None,
        /// Average the weights exponentially with this decay, and evaluate and save the averages.
        ema_decay: Option<f64> = None,

        /// The course of the learning rate: linear, cosine, constant_with_warmup, …
        lr_scheduler_type: LrSchedulerType = LrSchedulerType::Linear,
        /// Further settings of the schedule, as JSON.
        lr_scheduler_kwargs: LrSchedulerKwargs = LrSchedulerKwargs::default(),
        /// Updates over which the learning rate grows from 0; below 1, a share of all.
        warmup_steps: f64 = 0.0,
        /// The same as a share, where `warmup_steps` is 0.
        warmup_ratio: f64 = 0.0,

        /// When to log: no, steps or epoch.
        logging_strategy: IntervalStrategy = IntervalStrategy::Steps,
        /// Updates between two logs.
        logging_steps: f64 = 500.0,
        /// Log the first update, too.
        logging_first_step: bool = false,
        /// When to evaluate: no, steps or epoch.
        eval_strategy: IntervalStrategy = IntervalStrategy::No,
        /// Updates between two evaluations [default: those of logging_steps].
        eval_steps: Option<f64> = None,
        /// No evaluation before so many updates or epochs.
        eval_delay: f64 = 0.0,
        /// Evaluate before the first update; this is logged, and compared with nothing.
        eval_on_start: bool = false,
        /// When to save: no, steps, epoch, or best, at each evaluation that is better than all before.
        save_strategy: SaveStrategy = SaveStrategy::Steps,
        /// Updates between two checkpoints.
        save_steps: f64 = 500.0,
        /// The number of checkpoints to keep, the best one among them; never less than that and the newest [default: all].
        save_total_limit: Option<usize> = None,
        /// Leave frozen parameters out of checkpoints, such as the base of LoRA adapters.
        save_without_frozen: bool = false,
        /// Continue from the newest checkpoint of `output_dir` (auto: if there is one), or from that of a path.
        resume_from_checkpoint: ResumeFrom = ResumeFrom::No,
        /// End with the weights of the best checkpoint.
        load_best_model_at_end: bool = false,
        /// The metric by which checkpoints are compared [default: loss].
        metric_for_best_model: Option<String> = None,
        /// Set if more of it is better [default: unless its name ends in `loss`].
        greater_is_better: Option<bool> = None,
        /// Stop after so many evaluations without improvement.
        early_stopping_patience: Option<u64> = None,
        /// The least change that counts as an improvement.
        early_stopping_threshold: f64 = 0.0,

        /// The seed of weights and dropout.
        seed: u64 = 42,
        /// The seed of the order of samples [default: seed].
        data_seed: Option<u64> = None,
        /// Compute in bf16.
        bf16: bool = false,
        /// Compute in f16, with a scale of the loss.
        fp16: bool = false,
        /// Recompute the activations of units in backward instead of keeping them; `ACCEL_UNITS` also sets this.
        gradient_checkpointing: bool = false,
        /// Set to full_shard to shard the parameters of units over the ranks; `ACCEL_UNITS=shard` does the same.
        fsdp: FsdpStrategy = FsdpStrategy::NoShard,
        /// Keep sharded units in memory-mapped files in this folder; `ACCEL_OFFLOAD_FOLDER` does the same.
        offload_folder: Option<PathBuf> = None,
        /// Recompute the values of cheap operations in backward: Burn's own checkpointing.
        recompute_operations: bool = false,
        /// In which type gradients travel: none (as computed), bf16 or f16.
        #[serde(with = "word")]
        gradient_compression: Compression = Compression::None,
        /// Compare the ranks' weights after so many updates, again and again.
        check_replicas_steps: Option<u64> = None,
        /// Fail at a loss that is NaN or infinite.
        stop_at_non_finite_loss: bool = false,

        /// The destination of the run: none, run (the folder `runs`), csv, tensorboard, mlflow.
        report_to: Vec<ReportTo> = Vec::new(),
        /// The name of the run [default: that of output_dir].
        run_name: Option<String> = None,
        /// Show no progress bar.
        disable_tqdm: bool = false,
    }
}

words! {
    /// The interval at which something is done.
    pub enum IntervalStrategy: "strategy" {
        No = "no",
        Steps = "steps",
        Epoch = "epoch",
    }
}

words! {
    /// The moments at which checkpoints are saved.
    pub enum SaveStrategy: "save_strategy" {
        No = "no",
        Steps = "steps",
        Epoch = "epoch",
        Best = "best",
    }
}

words! {
    /// An optimizer, by Hugging Face's name. Give any other optimizer to the trainer with
    /// [`TrainerBuilder::optimizer`](super::TrainerBuilder::optimizer).
    pub enum OptimizerName: "optim" {
        AdamWTorchFused = "adamw_torch_fused",
        AdamWTorch = "adamw_torch",
        Sgd = "sgd",
    }
}

words! {
    /// The sharding strategy, with Hugging Face's names.
    pub enum FsdpStrategy: "fsdp" {
        NoShard = "no_shard",
        FullShard = "full_shard",
    }
}

words! {
    /// The order in which samples are taken.
    pub enum TrainSamplingStrategy: "train_sampling_strategy" {
        Random = "random",
        Sequential = "sequential",
    }
}

words! {
    /// The destination to which a training is recorded. Each of them begins a run in the folder `runs`.
    pub enum ReportTo: "report_to" {
        None = "none",
        Run = "run",
        Csv = "csv",
        TensorBoard = "tensorboard",
        Mlflow = "mlflow",
    }
}

/// The checkpoint from which a training continues, if any: `true`, `false`, `auto` or a path. A job that the launcher
/// restarts continues in any case.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(from = "ResumeWord", into = "ResumeWord")]
pub enum ResumeFrom {
    /// Begins anew.
    #[default]
    No,
    /// Continues from the newest good checkpoint of `output_dir`, if there is one: for a job that an engine restarts.
    Auto,
    /// Continues from the newest good checkpoint of `output_dir`, which must be there.
    Newest,
    /// Continues from that checkpoint, or the newest one of that folder.
    Path(PathBuf),
}

#[derive(Deserialize, Serialize)]
#[serde(untagged)]
enum ResumeWord {
    Flag(bool),
    Path(PathBuf),
}

impl From<ResumeWord> for ResumeFrom {
    fn from(word: ResumeWord) -> Self {
        match word {
            ResumeWord::Flag(false) => Self::No,
            ResumeWord::Flag(true) => Self::Newest,
            ResumeWord::Path(path) if path.as_os_str() == "auto" => Self::Auto,
            ResumeWord::Path(path) => Self::Path(path),
        }
    }
}

impl From<ResumeFrom> for ResumeWord {
    fn from(from: ResumeFrom) -> Self {
        match from {
            ResumeFrom::No => Self::Flag(false),
            ResumeFrom::Auto => Self::Path("auto".into()),
            ResumeFrom::Newest => Self::Flag(true),
            ResumeFrom::Path(path) => Self::Path(path),
        }
    }
}

impl TrainingArguments {
    /// Returns a builder of an accelerator with the seed, precision, accumulation and other settings of these
    /// arguments.
    ///
    /// A [`Trainer`](super::Trainer) makes one by itself. This is for a program that sets more, such as the type of the
    /// weights, and gives the trainer what it has built.
    pub fn accelerator(&self) -> AcceleratorBuilder {
        let mut builder = Accelerator::builder()
            .compression(self.gradient_compression)
            .seed(self.seed)
            .log_with(self.report_to.iter().filter_map(|x| x.tracker()));
        // 1 is the default of both.
        if self.gradient_accumulation_steps != 1 {
            builder = builder.accumulation_steps(self.gradient_accumulation_steps);
        }
        if let Some(precision) = self.precision() {
            builder = builder.precision(precision);
        }
        // Sharded units recompute their activations, too.
        if self.fsdp == FsdpStrategy::FullShard {
            builder = builder.units(Units::Shard);
        } else if self.gradient_checkpointing {
            builder = builder.units(Units::Recompute);
        }
        if let Some(folder) = &self.offload_folder {
            builder = builder.offload_folder(folder);
        }
        if self.recompute_operations {
            builder = builder.operations(Operations::Recompute);
        }
        if let Some(steps) = self.check_replicas_steps {
            builder = builder.check_replicas_every(steps);
        }
        if self.stop_at_non_finite_loss {
            builder = builder.stop_at_non_finite_loss();
        }
        builder
    }

    /// `None` leaves it to the environment.
    fn precision(&self) -> Option<Precision> {
        match (self.bf16, self.fp16) {
            (true, _) => Some(Precision::Bf16),
            (false, true) => Some(Precision::F16),
            (false, false) => None,
        }
    }

    pub(super) fn best_metric(&self) -> Option<BestMetric> {
        let is_asked = self.load_best_model_at_end
            || self.save_strategy == SaveStrategy::Best
            || self.early_stopping_patience.is_some()
            || self.metric_for_best_model.is_some();
        is_asked.then(|| {
            let name = self.metric_for_best_model.as_deref().unwrap_or("loss");
            let key = match name.starts_with("eval_") {
                true => name.to_owned(),
                false => format!("eval_{name}"),
            };
            let greater = self.greater_is_better.unwrap_or(!name.ends_with("loss"));
            BestMetric { key, greater }
        })
    }
}

#[derive(Clone, Debug)]
pub(super) struct BestMetric {
    pub(super) key: String,
    greater: bool,
}

impl BestMetric {
    pub(super) fn improves(&self, value: f64, best: f64, threshold: f64) -> bool {
        match self.greater {
            true => value > best + threshold,
            false => value < best - threshold,
        }
    }
}

impl ReportTo {
    /// Returns the tracker to which a run is delivered; the run itself is always there.
    pub(super) fn tracker(self) -> Option<crate::Tracker> {
        match self {
            Self::None | Self::Run => None,
            Self::Csv => Some(crate::Tracker::Csv),
            Self::TensorBoard => Some(crate::Tracker::TensorBoard),
            #[cfg(feature = "mlflow")]
            Self::Mlflow => Some(crate::Tracker::Mlflow),
            // An error says so before.
            #[cfg(not(feature = "mlflow"))]
            Self::Mlflow => None,
        }
    }
}
