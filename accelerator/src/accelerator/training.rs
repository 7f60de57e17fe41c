use std::sync::atomic::Ordering;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use super::Accelerator;
use super::prepare::{Prepare, check_kinds};
use crate::core::draws::{self, drawing};
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::Result;
use crate::core::offload::Offload;
use crate::data::batch::Weight;
use crate::model::{self, sync_buffers};
use crate::reduce::{self, AveragedGradients, MicroStep, OverlapReport, ReduceScope};
use crate::replicas;
use crate::unit::{self, Units};

/// The loop of a training.
impl Accelerator {
    /// Prepares models, optimizers and data loaders for the ranks of this job, and returns them in the same order.
    ///
    /// | give | get |
    /// |---|---|
    /// | a Burn module | the same module, with rank 0's parameters, buffers and parameter ids |
    /// | a `ModuleOptimizer` | a [`PreparedOptimizer`](crate::optim::PreparedOptimizer) whose `step` takes the learning rate |
    /// | `(optimizer, scheduler)` | one whose `step` advances the scheduler itself |
    /// | [`Sharded(optimizer)`](crate::optim::Sharded) | the same, with its state shared out over the ranks |
    /// | a [`Loader`](crate::data::Loader) | this rank's share, as a [`PreparedLoader`](crate::data::PreparedLoader) |
    /// | [`AssumeDeterministic`](crate::data::AssumeDeterministic) around one of Burn's own loaders | the same, shared out batch by batch |
    /// | a tuple of these | a tuple of those |
    ///
    /// Every rank must prepare the same things in the same order.
    ///
    /// A model is identified by its parameter ids, which are rank 0's from here on: use what is returned. A clone that
    /// was made before is another model, which is not prepared, on one process too: clone afterwards.
    ///
    /// A model that was prepared before is prepared again when other parts of it are to be trained: see
    /// [freezing](crate::optim#freezing-and-unfreezing-on-the-way). Its training continues: the count of its steps,
    /// and the scale of its losses. So a training from the start begins with a model that is built anew, and not
    /// with a clone.
    ///
    /// A model that has one `ParamId` in several places, such as a language model whose output layer is a clone of
    /// its token embedding, has one parameter there: it stays [tied](crate::model::retie_parameters).
    ///
    /// The accelerator keeps a few hundred bytes for each parameter of each prepared model as long as it lives, since
    /// it cannot detect that a program has dropped a model. A program that trains one model after the other needs
    /// [memory for the gradients](Self::bucket_memory) of one.
    ///
    /// A bare number is a Burn module too, so `(optimizer, 1e-3)` could be two things, and the
    /// compiler answers "type annotations needed" (E0283). Give a constant rate to `step`, or as
    /// `(optimizer, ConstantLr::new(1e-3))`.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::prelude::*;
    /// use burn::lr_scheduler::constant::ConstantLr;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::AdamConfig;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let model: Linear = LinearConfig::new(2, 1).init(&accelerator.device());
    /// let optimizer = (AdamConfig::new().init(), ConstantLr::new(1e-3));
    /// # let dataset = InMemDataset::new((0..32).collect());
    /// let train = LoaderBuilder::from_fn(|items: Vec<u32>, _| items).batch_size(8).build(dataset);
    /// let (model, optimizer, train) = accelerator.prepare((model, optimizer, train))?;
    /// # assert_eq!((optimizer.steps(), train.steps()), (0, Some(4)));
    /// # let _: Linear = model;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_model`](crate::Error::is_model) when the model's layout differs between ranks,
    /// naming the rank and the first path that differs;
    /// [`Error::is_config`](crate::Error::is_config) for a loader whose batch size is 0 or cannot be
    /// shared by this many ranks, whose data set has no samples or makes no step, or that differs between ranks, in
    /// [some of its items](crate::data#the-same-data-set-on-every-rank) too;
    /// [`Error::is_data`](crate::Error::is_data) or [`is_panic`](crate::Error::is_panic) where no rank of several can
    /// read these items;
    /// [`Error::is_misuse`](crate::Error::is_misuse) when ranks prepare different things, or in another order,
    /// for a model of which a parameter lies on a device that records no gradients, as `Device::default()`,
    /// and for a model that is prepared again in the middle of an accumulation window or of
    /// [local training](crate::local), which continue as if it had not been;
    /// [`Error::is_checkpoint`](crate::Error::is_checkpoint) for an optimizer with state that was loaded in another
    /// float type than that of its parameter, of a model that was prepared before;
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn prepare<K, P: Prepare<K>>(&self, parts: P) -> Result<P::Prepared> {
        check_kinds::<K, P>(self)?;
        parts.prepare(self)
    }

    /// Builds a model whose initial weights follow the seed alone, on the device of
    /// [`device`](Self::device).
    ///
    /// A rank that is a process gets that from plain `Model::new(&accelerator.device())` as well.
    /// Ranks that are threads share Burn's CPU generator, and draw from it all at once: there this
    /// method lets one build at a time, from the seed.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// let train = |accelerator: accelerator::Accelerator| {
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(3, 3).init(device));
    ///     let model = accelerator.prepare(model)?;
    ///     Ok(model.weight.val().into_data())
    /// };
    /// let alone = accelerator::launch(1, train)?;
    /// let together = accelerator::launch(4, train)?;
    /// assert!(together.iter().all(|weight| *weight == alone[0]));
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// With [`Units::Shard`](crate::nn::Units::Shard), only rank 0 initializes the parameters of units, and
    /// [`prepare`](Self::prepare) distributes them. A model with units that is never prepared, such as a teacher, must
    /// then be built by another accelerator, or without units.
    ///
    /// Within `build`, another model may be built by `init`, from the seed again; an accelerator cannot be,
    /// since that would set the generator under this model: [`Error::is_misuse`](crate::Error::is_misuse).
    pub fn init<M: Module + 'static>(&self, build: impl FnOnce(&Device) -> M) -> M {
        let _turn = drawing();
        let device = self.device();
        draws::seed(&device, self.shared.context.seed);
        let model = build(&device);
        let units = self.shared.reduction.settings.units;
        // With sharded units, `prepare` distributes rank 0's parameters: the other ranks never hold the whole model.
        if units == Units::Shard && !self.is_main_process() {
            unit::draw_outside(&model);
        } else if let Some(offload) = &self.shared.context.offload {
            return offload.drawn(BoxedModule::new(model)).into_model();
        } else {
            model::draw_all(&model);
        }
        model
    }

    /// Runs the backward pass of `loss` and, at the end of an accumulation window, averages the
    /// gradients of `model` over every sample of every rank.
    ///
    /// `loss` is the mean over this rank's batch, as Burn's losses give it. `weight` says over
    /// how many samples (or tokens): pass the batch itself, [`Batch::with_weight`], or a count. A bare count is not
    /// checked: an idle rank has a batch of padding, whose `num_samples()` is not 0. Pass `&batch`, or
    /// [`Batch::real`], which leaves padding out.
    /// The average is exact also where ranks or micro-steps hold different numbers of samples;
    /// an idle rank's gradient counts as zero.
    ///
    /// Nothing is communicated before the window ends. The result goes to
    /// [`PreparedOptimizer::step`], which leaves the model alone until then.
    ///
    /// Ranks pair gradients by the order of calls: if there are several, each calls it from one
    /// thread at a time. Burn 0.22.1 itself may lock up where one thread is in a backward pass while
    /// another computes with the same parameters.
    ///
    /// [`Batch::real`]: crate::data::Batch::real
    /// [`Batch::with_weight`]: crate::data::Batch::with_weight
    /// [`PreparedOptimizer::step`]: crate::optim::PreparedOptimizer::step
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Tensor;
    ///
    /// let losses = launch(2, |accelerator| {
    /// #     let device = accelerator.device();
    /// #     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
    /// #     let model = accelerator.prepare(model)?;
    ///     // A loss of 0 over one sample on rank 0, and of 1 over three on rank 1.
    ///     let samples = 1 + 2 * accelerator.rank();
    /// #     let zero = model.forward(Tensor::<2>::ones([samples, 2], &device)).mean() * 0.0;
    /// #     let loss = zero + accelerator.rank() as f64;
    ///     let gradients = accelerator.backward(loss, &model, samples)?;
    ///     Ok(gradients.loss())
    /// })?;
    /// assert_eq!(losses, [Some(0.75), Some(0.75)]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared, or that has trainable parameters
    /// that were frozen or not there when it was, or whose replicas
    /// differ in the middle of [local steps](crate::local), a loss that does not depend
    /// on it on any rank (which all learn at the end of the window), a weight that is not a number of samples
    /// or out of the [bounds](crate::Weight) of sums, a
    /// batch of a loader with [`TailPolicy::Uneven`](crate::plan::TailPolicy::Uneven), a call where the ranks are
    /// not together, as in [`on_main_process`](Self::on_main_process), which leaves the window as it is, or after
    /// a [`SyncBatchNorm`](crate::nn::SyncBatchNorm) was used there, a call after one that failed on some ranks
    /// alone and that their programs continued from, which all ranks are told until the next
    /// [`prepare`](Self::prepare) or [`resume`](Self::resume) of a model, a window whose batches are of other
    /// loaders, epochs or steps than those of another rank, which all ranks are told, or a call while another
    /// thread reduces gradients of the same model, or of one whose window is being reduced, which ends
    /// the group;
    /// [`Error::is_not_finite`](crate::Error::is_not_finite) for a loss that is NaN or infinite, where the builder
    /// was asked to [stop there](crate::AcceleratorBuilder::stop_at_non_finite_loss);
    /// [`Error::is_drift`](crate::Error::is_drift), on every rank, where one has stepped more often than another since
    /// the model was prepared, or with another learning rate or clip;
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost. The model
    /// is untouched in each case.
    #[track_caller]
    pub fn backward<M: Module + 'static>(
        &self,
        loss: Tensor<1>,
        model: &M,
        weight: impl Into<Weight>,
    ) -> Result<AveragedGradients> {
        let loss = MicroStep::Loss(loss);
        self.backward_of(loss, model, weight.into(), ReduceScope::Global)
    }

    /// Averages gradients of `model` over every sample of every rank, if the program has run the backward pass
    /// itself. It replaces [`backward`](Self::backward) for code that computes gradients by other means, as the
    /// `TrainStep` of burn-train does.
    ///
    /// `gradients` are those of the mean loss over this rank's batch, and `weight` says over how many samples, as in
    /// `backward`, with which everything else is the same: windows, buckets, bits. Since gradients are there only when
    /// the backward pass has ended, nothing is sent while it runs, and since no loss is given,
    /// [`AveragedGradients::loss`] is `None`.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::Tensor;
    ///
    /// let biases = launch(2, |accelerator| {
    ///     let device = accelerator.device();
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(1, 1).init(device));
    ///     let (model, mut optimizer) =
    ///         accelerator.prepare((model, burn::optim::SgdConfig::new().init()))?;
    ///     // A gradient of 1 over one sample on rank 0, and of 5 over three on rank 1.
    ///     let (factor, samples) = [(1.0, 1), (5.0, 3)][accelerator.rank()];
    ///     let loss = model.forward(Tensor::<2>::zeros([samples, 1], &device)).mean() * factor;
    ///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
    ///     let gradients = accelerator.average(gradients, &model, samples)?;
    ///     assert!(gradients.loss().is_none() && gradients.samples() == Some(4.0));
    ///     let before = model.bias.as_ref().map(|bias| bias.val().inner());
    ///     let model = optimizer.step(1.0, model, gradients);
    ///     let after = model.bias.as_ref().map(|bias| bias.val().inner());
    ///     Ok(before.zip(after).map(|(before, after)| (before - after).into_scalar::<f64>()))
    /// })?;
    /// assert_eq!(biases, [Some(4.0); 2]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`backward`](Self::backward) that are not about a loss, and
    /// [`Error::is_misuse`](crate::Error::is_misuse) in [`Precision::F16`](crate::precision::Precision::F16), where
    /// losses are scaled before their backward pass.
    #[track_caller]
    pub fn average<M: Module + 'static>(
        &self,
        gradients: GradientsParams,
        model: &M,
        weight: impl Into<Weight>,
    ) -> Result<AveragedGradients> {
        let gradients = MicroStep::Finished(gradients);
        self.backward_of(gradients, model, weight.into(), ReduceScope::Global)
    }

    /// The same over the samples of these ranks.
    #[track_caller]
    pub(crate) fn backward_of(
        &self,
        step: MicroStep,
        model: &dyn DynModule,
        weight: Weight,
        scope: ReduceScope,
    ) -> Result<AveragedGradients> {
        let context = &*self.shared.reduction;
        let timeline = &context.timeline;
        let gradients = reduce::backward(context, step, model, weight, scope, |model_state| {
            replicas::check_when_due(context, &self.shared.tracking, model_state, model)
        });
        if let Ok(gradients) = &gradients {
            let accumulates = gradients.is_accumulating();
            self.shared
                .accumulates
                .store(accumulates, Ordering::Relaxed);
        }
        match gradients {
            Ok(_) => timeline.backward_ends(),
            Err(_) => timeline.step_failed(),
        }
        gradients
    }

    /// Reports how the gradients of a model were sent in its last step. It does not block: while `backward` runs, as
    /// in a [communication hook](crate::hook::CommunicationHook), it describes the step before.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared.
    pub fn overlap_report<M: Module + 'static>(&self, model: &M) -> Result<OverlapReport> {
        Ok(self.shared.reduction.models.find(model)?.overlap_report())
    }

    /// Returns the number of bytes of the flat buffers in which this rank keeps gradients for communication, for all
    /// models together. A single process that does not accumulate needs none.
    ///
    /// They hold the gradients once, half-precision ones as `f32`, with a few numbers for each
    /// parameter, in whole pages. [Compression](crate::Compression) adds what travels. Where gradients are
    /// accumulated and communication [overlaps](crate::Overlap), they are there twice, since a step
    /// may have to be undone.
    pub fn bucket_memory(&self) -> usize {
        self.shared.context.group.buffer_bytes()
    }

    /// Returns the size in bytes of this rank's tensors in files of the
    /// [offload folder](crate::AcceleratorBuilder::offload_folder): parameters, optimizer state and, between `backward` and
    /// `step`, gradients. The gradients' buckets are not counted. Returns 0 if no folder is set.
    pub fn offloaded_memory(&self) -> usize {
        self.shared
            .context
            .offload
            .as_ref()
            .map_or(0, Offload::bytes)
    }

    /// Returns `true` if the last [`backward`](Self::backward) ended its accumulation window, so that its gradients
    /// are those of all ranks: the opposite of [`is_accumulating`](AveragedGradients::is_accumulating). Also `true`
    /// before the first call.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Tensor;
    ///
    /// let accelerator = Accelerator::builder().accumulation_steps(2).build()?;
    /// # let device = accelerator.device();
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    /// # let loss = || model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    /// let open = accelerator.backward(loss(), &model, 4)?;
    /// assert!(!accelerator.sync_gradients() && open.is_accumulating());
    /// let gradients = accelerator.backward(loss(), &model, 4)?;
    /// assert!(accelerator.sync_gradients() && !gradients.is_accumulating());
    /// # Ok::<(), Error>(())
    /// ```
    pub fn sync_gradients(&self) -> bool {
        !self.shared.accumulates.load(Ordering::Relaxed)
    }

    /// Returns true if the last step of an optimizer was skipped, since gradients were not finite in half precision;
    /// its [`outcome`](crate::optim::PreparedOptimizer::outcome) says so, too.
    pub fn optimizer_step_was_skipped(&self) -> bool {
        self.shared.optimizers.skipped()
    }

    /// Frees the memory that is kept between steps: the buffers in which gradients of all models travel. The next
    /// step allocates it again. Burn frees tensors when they are dropped, and its devices keep memory for later ones.
    pub fn free_memory(&self) {
        self.shared.reduction.models.release_spares();
    }
}

/// Checks and synchronizes the state of a model on all ranks.
impl Accelerator {
    /// Compares the parameters of a prepared model between all ranks, bit for bit.
    ///
    /// The ranks of a job hold the same parameters after every step: each computes the same
    /// update from the same averaged gradients. Where one does not, something outside of that
    /// changed its copy: code that runs on some ranks only, a random choice in the forward pass
    /// that touches parameters, a bit flip in memory. From then on the ranks silently train different models.
    /// [`check_replicas_every`](crate::AcceleratorBuilder::check_replicas_every) does this check
    /// during training, and [`valid`](Self::valid), [`save_model`](Self::save_model) and
    /// [`save_state`](Self::save_state) do it for the models that they are given. Those compare what is trained: to read
    /// what is frozen as well, most of a large model that is fine-tuned, would cost more than they do. This method
    /// compares both.
    ///
    /// Each rank hashes its parameters, and 32 bytes travel; measured on a 2-core machine, 7 MB
    /// of parameters take 3 ms. Buffers, such as the running statistics of a batch norm, are
    /// every rank's own and not compared.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// let outcomes = accelerator::launch(3, |accelerator| {
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 2).init(device));
    ///     let mut model = accelerator.prepare(model)?;
    ///     accelerator.check_replicas(&model)?;
    ///     if accelerator.rank() == 1 {
    ///         model.weight = model.weight.map(|weight| {
    ///             (weight + 1e-3).detach().require_grad()
    ///         });
    ///     }
    ///     Ok(accelerator.check_replicas(&model).unwrap_err())
    /// })?;
    /// for error in outcomes {
    ///     assert!(error.is_drift());
    ///     assert!(error.to_string().contains("rank 1") && error.to_string().contains("`weight`"));
    /// }
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_drift`](crate::Error::is_drift) on every rank, naming the ranks that differ from the majority, or all
    /// of them if there is none, and the first path that differs; [`Error::is_misuse`](crate::Error::is_misuse) for a
    /// model that was not prepared; [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn check_replicas<M: Module + 'static>(&self, model: &M) -> Result<()> {
        replicas::check_all(&self.shared.reduction, &self.shared.tracking, model)
    }

    /// Gives every rank the running statistics of all: each has seen its own share of the data.
    ///
    /// Means are averaged, and a `running_var` becomes the variance of everything that the ranks have
    /// seen, `mean(var + mean²) − mean(mean)²`. Any other buffer that a module keeps in a `RunningState` is
    /// averaged. What is the same on all ranks stays as it is, to the bit, and costs eight bytes. Parameters,
    /// trained or frozen, are neither compared nor touched.
    ///
    /// All ranks have the same weight, since a running statistic does not hold its number of samples. Where ranks
    /// train on unequal shares for long, or one is often idle, use [`SyncBatchNorm`](crate::nn::SyncBatchNorm), which
    /// weights by samples.
    ///
    /// [`save_model`](Self::save_model) and [`save_state`](Self::save_state) do this by themselves, and
    /// [`valid`](Self::valid) for evaluation. An emergency checkpoint holds the writer's own.
    ///
    /// ```
    /// use burn::nn::{BatchNorm, BatchNormConfig};
    /// use burn::tensor::Tensor;
    ///
    /// let means = accelerator::launch(2, |accelerator| {
    ///     let device = accelerator.device();
    ///     let model: BatchNorm = accelerator.prepare(BatchNormConfig::new(1).with_momentum(1.0).init(&device))?;
    ///     let value = accelerator.rank() as f64 * 4.0;
    ///     model.forward(Tensor::<2>::full([3, 1], value, &device));
    ///     accelerator.sync_buffers(&model)?;
    ///     Ok((model.running_mean.value().into_scalar::<f64>(), model.running_var.value().into_scalar::<f64>()))
    /// })?;
    /// assert_eq!(means, [(2.0, 4.0), (2.0, 4.0)]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost, or has another model.
    #[track_caller]
    pub fn sync_buffers<M: Module + 'static>(&self, model: &M) -> Result<()> {
        sync_buffers(&self.shared.context, model)
    }

    /// Returns the model for evaluation, as Burn's `model.valid()` does, with the running statistics of all ranks;
    /// see [`sync_buffers`](Self::sync_buffers). Before that, the parameters of a prepared model are
    /// [compared](Self::check_replicas). Every rank must call it.
    ///
    /// # Errors
    ///
    /// The errors of [`sync_buffers`](Self::sync_buffers); [`Error::is_drift`](crate::Error::is_drift) on every rank if
    /// the parameters are no longer the same on all of them; [`Error::is_misuse`](crate::Error::is_misuse) on every
    /// rank in the middle of a round of [local training](crate::local), where each rank has a model of its own, and
    /// what they measure together is that of none: evaluate when it was averaged, or this rank's replica with Burn's
    /// `model.valid()`.
    #[track_caller]
    pub fn valid<M: Module + 'static>(&self, model: &M) -> Result<M> {
        let (reduction, tracking) = (&self.shared.reduction, &self.shared.tracking);
        replicas::check_and_sync(reduction, tracking, "evaluate the model", model)?;
        Ok(model.valid())
    }
}
