//! The parts that a trainer prepares for a group of ranks: at its beginning, and for each group that it joins later.

use core::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use accelerator_manifest::Folder;
use accelerator_plan::TailPolicy;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::module::{Module, ParamGroup};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, Optimizer, SgdConfig};
use burn::tensor::Device;

use crate::accelerator::Accelerator;
use crate::checkpoint::{Object, Position};
use crate::core::agreement::{self, Term};
use crate::core::error::{Error, Result};
use crate::data::{Loader, LoaderBuilder, PreparedLoader};
use crate::ema::Ema;
use crate::optim::{InitFused, Manual, PreparedOptimizer, Sharded};
use crate::train::arguments::{
    OptimizerName, ResumeFrom, SaveStrategy, TrainSamplingStrategy, TrainingArguments,
};
use crate::train::flow::Flow;
use crate::train::state::TrainerState;

/// The optimizer and the data, from which the parts for a group of ranks are made.
pub(super) struct Unprepared<I> {
    pub(super) optimizer: ModuleOptimizer,
    pub(super) train: Option<Arc<dyn Dataset<I>>>,
    pub(super) eval: Option<Arc<dyn Dataset<I>>>,
}

/// The parts of a trainer that belong to one group of ranks, resumed if there is something to resume from.
pub(super) struct Parts<M, O> {
    pub(super) model: M,
    pub(super) optimizer: PreparedOptimizer<Manual>,
    pub(super) train: Option<TrainData<O>>,
    pub(super) eval: Option<PreparedLoader<O>>,
    pub(super) ema: Option<Ema<M>>,
    pub(super) state: TrainerState,
    pub(super) resumed: Option<Resumed>,
}

/// The data to train on, and the schedule of its updates.
pub(super) struct TrainData<O> {
    pub(super) flow: Flow,
    pub(super) loader: PreparedLoader<O>,
}

impl<O: Send + 'static> TrainData<O> {
    pub(super) fn new(arguments: &TrainingArguments, loader: PreparedLoader<O>) -> Self {
        let flow = Flow::new(arguments, loader.steps().unwrap_or(0));
        Self { flow, loader }
    }
}

/// The source of a resume: a checkpoint in `folder`, or the memory of the previous group.
pub(super) struct Resumed {
    pub(super) folder: PathBuf,
    pub(super) position: Position,
}

impl<I: fmt::Debug + Send + Sync + 'static> Unprepared<I> {
    /// Compares the arguments of the ranks, and checks the folder of checkpoints. Returns the path to resume from, or
    /// `None` to start from the beginning. A restarted process, or one whose group has the state of a training in
    /// memory, resumes even if `resume_from_checkpoint` is not set.
    pub(super) fn check(
        &self,
        accelerator: &Accelerator,
        arguments: &TrainingArguments,
    ) -> Result<Option<PathBuf>> {
        let terms = arguments.to_map()?.into_iter();
        let terms: Vec<_> = terms
            .map(|(name, value)| Term::new(format!("the argument `{name}`"), value))
            .collect();
        let group = accelerator.group();
        agreement::check_all(group, &terms)?;
        let mut has_state = accelerator.has_state_in_memory();
        if group.world_size() > 1 {
            let group = group.for_purpose("begin a training");
            has_state = group.broadcast_object(Some(&has_state), 0)?;
        }
        let continues = has_state || accelerator.restarts() > 0;
        let resume_from = match &arguments.resume_from_checkpoint {
            ResumeFrom::Path(path) => Some(path.clone()),
            ResumeFrom::No if !continues || self.train.is_none() => None,
            ResumeFrom::No | ResumeFrom::Auto | ResumeFrom::Newest => {
                Some(arguments.output_dir.clone())
            }
        };
        if self.train.is_some() && arguments.save_strategy != SaveStrategy::No {
            let folder = &arguments.output_dir;
            let context = &accelerator.shared.context;
            context.on_main("prepare the folder of checkpoints", || {
                check_folder(folder, resume_from.is_some())
            })?;
        }
        Ok(resume_from)
    }

    /// Prepares the parts and resumes them. Every rank of the group must call it.
    pub(super) fn prepare<M: Module + fmt::Display + 'static, O: Send + 'static>(
        &self,
        accelerator: &Accelerator,
        arguments: &TrainingArguments,
        collator: &Arc<dyn Batcher<I, O>>,
        model: M,
        resume_from: Option<PathBuf>,
    ) -> Result<Parts<M, O>> {
        accelerator.set_accumulation_steps(arguments.gradient_accumulation_steps)?;
        let model = accelerator.prepare(model)?;
        let optimizer = self.optimizer.clone();
        let optimizer: PreparedOptimizer<Manual> = match arguments.sharded_optimizer {
            true => accelerator.prepare(Sharded(optimizer))?,
            false => accelerator.prepare(optimizer)?,
        };
        let train = match &self.train {
            Some(dataset) => {
                let loader = train_loader(arguments, collator, dataset.clone());
                let loader = accelerator.prepare(loader)?;
                // If the number of ranks has changed, the global batch size stays the same.
                let loader = match &resume_from {
                    Some(folder) => accelerator.resume_loader(folder, loader)?,
                    None => loader,
                };
                Some(TrainData::new(arguments, loader))
            }
            None => None,
        };
        let eval = match &self.eval {
            Some(dataset) => {
                let loader = eval_loader(arguments, collator, dataset.clone());
                Some(accelerator.prepare(loader)?)
            }
            None => None,
        };
        let ema = arguments.ema_decay.map(|decay| Ema::new(&model, decay));
        let parts = Parts {
            model,
            optimizer,
            train,
            eval,
            ema,
            state: TrainerState::default(),
            resumed: None,
        };
        match resume_from {
            Some(folder) => parts.resumed(accelerator, arguments, folder),
            None => Ok(parts),
        }
    }
}

impl<M: Module + fmt::Display + 'static, O: Send + 'static> Parts<M, O> {
    fn resumed(
        self,
        accelerator: &Accelerator,
        arguments: &TrainingArguments,
        folder: PathBuf,
    ) -> Result<Self> {
        let Self {
            model,
            optimizer,
            train,
            eval,
            ema,
            state,
            ..
        } = self;
        let Some(TrainData { flow, loader }) = train else {
            return Err(Error::config(
                "resume_from_checkpoint: there is no training data to continue with; pass `train_dataset`",
            ));
        };
        let ((model, optimizer, loader, Object(state)), ema, position) = match ema {
            Some(ema) => {
                let parts = (model, optimizer, loader, Object(state), ema);
                let ((model, optimizer, loader, state, ema), position) = accelerator
                    .resume(&folder, parts)
                    .map_err(explain_mismatch)?;
                ((model, optimizer, loader, state), Some(ema), position)
            }
            None => {
                let parts = (model, optimizer, loader, Object(state));
                let (parts, position) = accelerator
                    .resume(&folder, parts)
                    .map_err(explain_mismatch)?;
                (parts, None, position)
            }
        };
        let may_be_absent = matches!(
            arguments.resume_from_checkpoint,
            ResumeFrom::No | ResumeFrom::Auto
        );
        if position.is_start() && !may_be_absent {
            return Err(Error::config(format!(
                "resume_from_checkpoint: there is no checkpoint in `{}`; leave the argument out to begin anew",
                folder.display()
            )));
        }
        Ok(Self {
            model,
            optimizer,
            train: Some(TrainData { flow, loader }),
            eval,
            ema,
            state,
            resumed: Some(Resumed { folder, position }),
        })
    }
}

/// Adds to a checkpoint error the arguments that must match the checkpoint.
fn explain_mismatch(error: Error) -> Error {
    match error.is_checkpoint() {
        true => {
            let message = format!(
                "resume_from_checkpoint: {error}; to resume, use the model, `optim`, `ema_decay`, \
                 `sharded_optimizer`, `tail`, `data_seed` and batch size of the checkpoint"
            );
            Error::new(error.kind(), message).with_source(error)
        }
        false => error,
    }
}

/// Checks that checkpoints can be written to `folder`, so that training fails before the first update and not at the
/// first save. Unless `resumes` is set, `folder` must contain no checkpoints: a restart would resume from them.
fn check_folder(folder: &Path, resumes: bool) -> Result<()> {
    let probe = std::fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
    probe.map_err(|error| Error::io("write checkpoints to output_dir", folder, error))?;
    let before = Folder::open(folder)?.checkpoints()?;
    match before.last() {
        Some(last) if !resumes => Err(Error::config(format!(
            "output_dir `{}` has checkpoints of another training, up to {}: continue from them by \
             resume_from_checkpoint (true or auto), name another folder, or remove them",
            folder.display(),
            last.number(),
        ))),
        _ => Ok(()),
    }
}

fn train_loader<I: fmt::Debug + Send + Sync + 'static, O: Send + 'static>(
    arguments: &TrainingArguments,
    collator: &Arc<dyn Batcher<I, O>>,
    dataset: Arc<dyn Dataset<I>>,
) -> Loader<O> {
    let tail = match arguments.dataloader_drop_last {
        true => TailPolicy::Drop,
        false => arguments.tail,
    };
    let loader = batches(arguments, collator, arguments.per_device_train_batch_size).tail(tail);
    let loader = match arguments.train_sampling_strategy {
        TrainSamplingStrategy::Random => {
            loader.shuffle(arguments.data_seed.unwrap_or(arguments.seed))
        }
        TrainSamplingStrategy::Sequential => loader,
    };
    loader.build(dataset)
}

pub(super) fn eval_loader<I: fmt::Debug + Send + Sync + 'static, O: Send + 'static>(
    arguments: &TrainingArguments,
    collator: &Arc<dyn Batcher<I, O>>,
    dataset: impl Dataset<I> + 'static,
) -> Loader<O> {
    batches(arguments, collator, arguments.per_device_eval_batch_size).build(dataset)
}

fn batches<I: fmt::Debug + Send + Sync + 'static, O: Send + 'static>(
    arguments: &TrainingArguments,
    collator: &Arc<dyn Batcher<I, O>>,
    size: usize,
) -> LoaderBuilder<I, O> {
    let collator = collator.clone();
    LoaderBuilder::from_fn(move |items, device: &Device| collator.batch(items, device))
        .batch_size(size)
        .num_workers(arguments.dataloader_num_workers)
}

/// The optimizer that the arguments name. Its weight decay leaves out biases and the parameters of norms.
pub(super) fn build_optimizer(arguments: &TrainingArguments) -> ModuleOptimizer {
    let decay = arguments.weight_decay as f32;
    match arguments.optim {
        OptimizerName::AdamWTorchFused => {
            decaying(decay, |decay| adamw(arguments, decay).build_fused())
        }
        OptimizerName::AdamWTorch => decaying(decay, |decay| adamw(arguments, decay).build()),
        OptimizerName::Sgd => decaying(decay, |decay| sgd(arguments, decay).build_fused()),
    }
}

fn adamw(arguments: &TrainingArguments, decay: f32) -> AdamWConfig {
    AdamWConfig::new()
        .with_beta_1(arguments.adam_beta1 as f32)
        .with_beta_2(arguments.adam_beta2 as f32)
        .with_epsilon(arguments.adam_epsilon as f32)
        .with_weight_decay(decay)
}

fn sgd(arguments: &TrainingArguments, decay: f32) -> SgdConfig {
    let momentum = (arguments.momentum > 0.0).then_some(MomentumConfig {
        momentum: arguments.momentum,
        dampening: 0.0,
        nesterov: false,
    });
    SgdConfig::new()
        .with_momentum(momentum)
        .with_weight_decay(penalty(decay))
}

fn penalty(decay: f32) -> Option<WeightDecayConfig> {
    (decay > 0.0).then(|| WeightDecayConfig::new(decay))
}

/// Builds one optimizer with the decay, and one without it for the parameters that Hugging Face's
/// `get_decay_parameter_names` leaves out.
fn decaying<O: Optimizer>(decay: f32, build: impl Fn(f32) -> O) -> ModuleOptimizer {
    let all = ModuleOptimizer::from(build(decay));
    match ParamGroup::from_regex(UNDECAYED) {
        Ok(undecayed) if decay > 0.0 => all.with_group(undecayed, build(0.0), None),
        _ => all,
    }
}

const UNDECAYED: &str = r"(^|\.)(bias|beta|gamma)$";
