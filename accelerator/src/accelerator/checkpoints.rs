use core::fmt;
use std::io;
use std::path::Path;

use accelerator_host::fs::{Durability, Replace};
use burn::module::Module;
use serde::Serialize;

use super::{Accelerator, Prepare};
use crate::checkpoint::{
    self, Checkpoints, DynSave, Position, Resume, Save, Saved, SavedAs, Saving, SurvivorState,
};
use crate::core::dyn_module::BoxedModule;
use crate::core::error::{Error, Result};
use crate::core::module;
use crate::data::{Loader, PreparedLoader};
use crate::model::{self, LoadOptions, LoadReport, SaveOptions};
use crate::optim::{PreparedOptimizer, Scheduled};
use crate::replicas;

/// Saves everything that training depends on, and resumes from it.
/// Only rank 0 writes and reads files, so no common file system is needed; every rank
/// must call the same method, except [`save_emergency`](Self::save_emergency).
impl Accelerator {
    /// Saves a checkpoint: model, optimizer with its schedule, the positions of the loaders, and values of the
    /// program's own, in one new folder within `checkpoints`.
    ///
    /// Save between optimizer steps: when `optimizer.outcome()` is `Stepped`, or after an epoch.
    /// Batches count as used when they went into an optimizer step; a batch that was taken from the
    /// loader and is not there yet comes again.
    ///
    /// First all ranks compare what they are about to save; if one is not ready, none saves. Then running statistics
    /// are [combined](Self::sync_buffers) on all ranks, so that this run continues as a resumed one does. Then rank 0
    /// writes under a hidden name, which it renames at the end. Then old checkpoints are removed, beyond the
    /// [limit](Checkpoints::with_total_limit).
    ///
    /// # Errors
    ///
    /// The same on every rank: [`Error::is_misuse`](crate::Error::is_misuse) between the micro-steps
    /// of a window, or between the steps of two models with one batch, for a model that was not prepared, an
    /// optimizer without its model, or ranks that save different things; [`Error::is_config`](crate::Error::is_config)
    /// if ranks are given different folders, which it shows; [`Error::is_drift`](crate::Error::is_drift) if the
    /// parameters of a model are no longer [the same](Self::check_replicas) on all ranks;
    /// [`Error::is_io`](crate::Error::is_io) when rank 0 cannot write;
    /// [`Error::is_checkpoint`](crate::Error::is_checkpoint) when a hook fails. The outcome of an
    /// earlier [`save_state_async`](Self::save_state_async) that nobody waited for is told here,
    /// and nothing is saved then. [`Error::is_collective`](crate::Error::is_collective) when a rank
    /// is lost: a checkpoint is there complete, or not at all.
    #[track_caller]
    pub fn save_state<K>(
        &self,
        checkpoints: impl Into<Checkpoints>,
        parts: impl Save<K>,
    ) -> Result<Saved> {
        self.save_state_with(&checkpoints.into(), &SavedAs::new(parts))
    }

    #[track_caller]
    pub(crate) fn save_state_with(
        &self,
        checkpoints: &Checkpoints,
        parts: &dyn DynSave,
    ) -> Result<Saved> {
        checkpoint::save(&self.shared.checkpoints, checkpoints, parts)
    }

    /// Saves like [`save_state`](Self::save_state), but writes on a separate thread. Training waits only until the
    /// values are captured as handles of tensors, which later steps do not change. Until the save is done, the old
    /// values take memory.
    ///
    /// One save runs at a time: the next one first waits for it.
    ///
    /// # Errors
    ///
    /// The errors of [`save_state`](Self::save_state), for what is found before the writing begins. What goes
    /// wrong later is told on every rank by [`Saving::wait`], the next save, or
    /// [`finish`](Self::finish).
    #[track_caller]
    pub fn save_state_async<K>(
        &self,
        checkpoints: impl Into<Checkpoints>,
        parts: impl Save<K>,
    ) -> Result<Saving> {
        let parts = SavedAs::new(parts);
        checkpoint::save_async(&self.shared.checkpoints, checkpoints.into(), &parts)
    }

    /// Saves a checkpoint on the survivors, after an error that [is about a lost peer](crate::Error::is_peer_lost).
    ///
    /// Ranks do not communicate here: each uses the failures that were reported to it, waits up to a second for more,
    /// and derives the same [list of lost ranks](crate::collective::ProcessGroup::lost). The lowest rank that is not
    /// on it writes, on its own host, and gets `Some`; the others check once more that it is alive, and do nothing.
    /// If the network splits, each side considers the other lost and writes a checkpoint: a folder that both see
    /// has two, of the same step. A writer that dies while it writes leaves none, which the others may not detect.
    ///
    /// The checkpoint is that of the last complete step: a window that failed, or is open, is not in
    /// it, and its batches come again. Running statistics of a batch norm are the writer's own.
    ///
    /// It removes no older checkpoint, and does not count towards the [limit](Checkpoints::with_total_limit). It may
    /// lack parts, such as a sharded optimizer, part of whose state is lost with the rank: then
    /// [`resume`](Self::resume) skips it, in favor of the newest checkpoint that has all parts.
    ///
    /// ```no_run
    /// # use accelerator::prelude::*;
    /// # fn train(_: &Accelerator, _: &mut u64) -> Result<()> { Ok(()) }
    /// use accelerator::checkpoint::Object;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let mut state = 0;
    /// if let Err(error) = train(&accelerator, &mut state) {
    ///     if error.is_peer_lost() {
    ///         accelerator.save_emergency("checkpoints/a", Object(&state))?;
    ///     }
    ///     return Err(error);
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) when no rank is lost: every rank must have
    /// come here to find that. The error of the group when it failed in another way.
    /// [`Error::is_peer_lost`](crate::Error::is_peer_lost) when no rank is left that could write.
    /// [`Error::is_io`](crate::Error::is_io) when the checkpoint cannot be written.
    #[track_caller]
    pub fn save_emergency<K>(
        &self,
        checkpoints: impl Into<Checkpoints>,
        parts: impl Save<K>,
    ) -> Result<Option<Saved>> {
        let parts = SavedAs::new(parts);
        checkpoint::save_emergency(&self.shared.checkpoints, &checkpoints.into(), &parts)
    }

    /// Loads the newest good checkpoint of the folder into prepared parts, and returns the position to continue from.
    /// Without any checkpoint, parts are returned as they are, and [`Position::is_start`] is true. In a group that was
    /// joined by [`regroup`](Self::regroup), the first call continues from the state of the group before instead.
    ///
    /// Pass the parts that were saved, in the same order, the values of your own as they are at the
    /// start. `checkpoints` may also be the path of one checkpoint.
    ///
    /// - Models get values and parameter ids; optimizers their state, with schedule and count.
    /// - Loaders: the epoch that was not finished continues after the last sample that was used, with
    ///   the same order of samples; every other epoch is whole. Loaders that no gradients were made
    ///   from begin anew, as validation does. So does one that is read beside another (`labelled.zip(unlabelled)`) where
    ///   `backward` gets the batch of that other alone: give it each batch with its own loss, in one window
    ///   ([`no_sync`](crate::Weight::no_sync) for the first), and both continue; or save at the ends of epochs.
    ///   Pass every loader of the training: one that was not saved begins anew.
    /// - [`AssumeDeterministic`](crate::data::AssumeDeterministic) loaders of Burn's own skip what was used by reading and
    ///   dropping it. That needs as many ranks as before, and an order that is the same each time.
    /// - At another number of ranks, a step uses as many samples as before, divided as evenly as
    ///   possible, and the learning rate stays: see [`Checkpoints::with_rescale`]. With
    ///   [`global_batch`](crate::AcceleratorBuilder::global_batch), batches stay as they are, and micro-steps
    ///   follow. A schedule over the steps of a plan needs the loader first: see
    ///   [`resume_loader`](Self::resume_loader).
    /// - Running statistics of a batch norm are those of all ranks that saved, on every rank.
    ///
    /// Figures that are built over an epoch, such as its mean loss, are saved and resumed beside these: see
    /// [`metric`](crate::metric#in-a-checkpoint), also for another number of ranks.
    ///
    /// Damaged checkpoints are skipped with a warning, and left in place; so are [emergency](Self::save_emergency) ones
    /// that lack parts. A checkpoint that cannot be read is an error, since it may be good.
    ///
    /// # Errors
    ///
    /// The same on every rank. It never starts afresh by itself.
    ///
    /// [`Error::is_checkpoint`](crate::Error::is_checkpoint) for
    ///
    /// - other parts than were saved,
    /// - a loader with another number or order of samples,
    /// - another kind of scheduler, or of optimizer by the state that it keeps (AdamW in place of Adam is not told, and a
    ///   momentum that is turned on or off is a warning),
    /// - a schedule that gives another rate for the last step where the number of ranks is another one and the
    ///   samples of a step are not (elsewhere, and where the steps were planned with what
    ///   [`resume_loader`](Self::resume_loader) gave back, it is a warning: a program may change its schedule),
    /// - state of an optimizer that Burn would load in another float type than that in which it was saved (see
    ///   [`fused`](crate::optim::fused)),
    /// - a folder in which no checkpoint is whole,
    /// - the path of a checkpoint that has lost its manifest, or does not exist.
    ///
    /// [`Error::is_model`](crate::Error::is_model) for a model of another layout.
    /// [`Error::is_config`](crate::Error::is_config) if batches cannot be divided over the ranks, ranks are
    /// given different folders or parts, or the factor of a [rule](Checkpoints::with_rescale) is not a positive number.
    /// [`Error::is_misuse`](crate::Error::is_misuse) for the folder of a tracked run.
    /// [`Error::is_io`](crate::Error::is_io) when rank 0 cannot read.
    #[track_caller]
    pub fn resume<K, P: Resume<K>>(
        &self,
        checkpoints: impl Into<Checkpoints>,
        parts: P,
    ) -> Result<(P, Position)> {
        let resumed = checkpoint::resume(&self.shared.checkpoints, &checkpoints.into(), parts)?;
        let brought = self.shared.brought.lock().take();
        // What is logged earlier makes a rewind of the run final that the resume would have replaced.
        if let Some((text, step)) = brought.and_then(SurvivorState::recovery)
            && self.is_main_process()
        {
            self.shared.tracking.recovered(text, step);
        }
        Ok(resumed)
    }

    /// Returns true if this rank has brought the state of a training into the group, to resume from.
    pub(crate) fn has_state_in_memory(&self) -> bool {
        self.shared.checkpoints.live().is_some()
    }

    /// Resumes a loader alone, before there is an optimizer. A [plan](Self::plan), and a schedule over its steps,
    /// then count the batches with which training continues at another number of ranks. Pass all parts to
    /// [`resume`](Self::resume) afterwards. Without any checkpoint, the loader is returned as it is.
    ///
    /// The loader is found by its number among the loaders that the program has prepared. The checkpoint is
    /// verified each time. As `resume` will, this passes over an [emergency](Self::save_emergency)'s that has other parts
    /// than the newest full one.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
    /// use burn::optim::SgdConfig;
    /// # use burn::data::dataset::InMemDataset;
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let folder = folder.path();
    ///
    /// let life = |ranks| launch(ranks, |accelerator| {
    ///     let dataset = InMemDataset::new((0..96).collect());
    ///     let train = LoaderBuilder::from_fn(|items: Vec<u32>, _| items).batch_size(8).build(dataset);
    ///     let train = accelerator.prepare(train)?;
    ///     let train = accelerator.resume_loader(folder, train)?;
    ///     let steps = accelerator.plan(&train, 3).steps.expect("a data set knows its length");
    ///     let schedule = CosineAnnealingLrSchedulerConfig::new(1e-2, steps as usize).init().unwrap();
    ///     let optimizer = accelerator.prepare((SgdConfig::new().init(), schedule))?;
    ///     let ((optimizer, train), _) = accelerator.resume(folder, (optimizer, train))?;
    ///     accelerator.save_state(folder, (&optimizer, &train))?;
    ///     Ok(steps)
    /// });
    /// assert_eq!(life(2)?, [18, 18]);
    /// assert_eq!(life(1)?, [18], "batches of 16 are kept");
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The same on every rank: those of [`resume`](Self::resume) that are about loaders and folders, and
    /// [`Error::is_checkpoint`](crate::Error::is_checkpoint) if no loader of that number was saved.
    #[track_caller]
    pub fn resume_loader<O: Send + 'static>(
        &self,
        checkpoints: impl Into<Checkpoints>,
        loader: PreparedLoader<O>,
    ) -> Result<PreparedLoader<O>> {
        checkpoint::resume_loader(&self.shared.checkpoints, &checkpoints.into(), loader)
    }

    /// Prepares a model, its optimizer and its training data, with a schedule over the optimizer steps of that many
    /// epochs, and resumes them if there is a checkpoint.
    ///
    /// `schedule` is given the number of steps, counted with the batches with which training continues. This is
    /// [`prepare`](Self::prepare), [`resume_loader`](Self::resume_loader), [`plan`](Self::plan) and
    /// [`resume`](Self::resume) in one call.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// # use burn::data::dataset::InMemDataset;
    /// # use burn::tensor::Tensor;
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let folder = folder.path();
    ///
    /// let accelerator = Accelerator::new()?;
    /// let device = accelerator.device();
    /// let model: Linear = LinearConfig::new(2, 1).init(&device);
    /// let optimizer = SgdConfig::new().init();
    /// # let data = InMemDataset::new((0..96).collect());
    /// let train = LoaderBuilder::from_fn(|items: Vec<u32>, _| items).batch_size(8).build(data);
    ///
    /// let ((mut model, mut optimizer, train), position) = accelerator.prepare_and_resume(
    ///     folder,
    ///     3,
    ///     (model, optimizer, train),
    ///     |steps| CosineAnnealingLrSchedulerConfig::new(1e-2, steps).init(),
    /// )?;
    /// for epoch in position.epoch()..3 {
    ///     for batch in train.epoch(epoch) {
    ///         let batch = batch?;
    ///         let loss = model.forward(Tensor::<2>::ones([8, 2], &device)).mean();
    ///         let gradients = accelerator.backward(loss, &model, &batch)?;
    ///         model = optimizer.step(model, gradients);
    ///     }
    ///     accelerator.save_state(folder, (&model, &optimizer, &train))?;
    /// }
    /// assert_eq!(optimizer.steps(), 36);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of the four methods. [`Error::is_config`](crate::Error::is_config) if `schedule` fails, or if the data is
    /// a stream, whose number of steps nobody knows.
    #[track_caller]
    #[expect(
        clippy::type_complexity,
        reason = "an alias would be one more name to look up"
    )]
    pub fn prepare_and_resume<M, P, O, S>(
        &self,
        checkpoints: impl Into<Checkpoints>,
        epochs: u64,
        (model, optimizer, train): (M, P, Loader<O>),
        schedule: impl FnOnce(usize) -> core::result::Result<S, String>,
    ) -> Result<(
        (M, PreparedOptimizer<Scheduled>, PreparedLoader<O>),
        Position,
    )>
    where
        M: Module + fmt::Display + 'static,
        O: Send + 'static,
        (P, S): Prepare<module::Part, Prepared = PreparedOptimizer<Scheduled>>,
    {
        let checkpoints = checkpoints.into();
        let train = self.resume_loader(&checkpoints, self.prepare(train)?)?;
        let Some(steps) = self.plan(&train, epochs).steps else {
            return Err(Error::config(
                "a schedule over the steps of a stream cannot be made, since nobody knows their number: prepare the \
                 parts by themselves, with a schedule over steps that you choose",
            ));
        };
        let schedule = schedule(steps as usize).map_err(|error| {
            Error::config(format!(
                "the schedule over {steps} optimizer steps: {error}"
            ))
        })?;
        let parts = (model, (optimizer, schedule));
        let (model, optimizer) = self.prepare::<(module::Model, module::Part), _>(parts)?;
        let parts = (model, optimizer, train);
        self.resume::<(module::Model, module::Part, module::Part), _>(checkpoints, parts)
    }
}

/// Models on disk, as safetensors.
impl Accelerator {
    /// Writes the model to `path`, by parameter path, once for all ranks: rank 0 writes, and the others learn whether
    /// it succeeded. The file appears whole or not at all. If several jobs save to one path, the file of the last one
    /// stays. Running statistics are those of all ranks; see [`sync_buffers`](Self::sync_buffers).
    ///
    /// Parameters have the shapes that Burn gives them (a `Linear` weight is `[in, out]`). For
    /// PyTorch's, and for several files, see [`save_model_with`](Self::save_model_with).
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// # fn main() -> accelerator::Result<()> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("model.safetensors");
    /// let accelerator = Accelerator::new()?;
    /// let device = accelerator.device();
    /// let model: Linear = accelerator.prepare(LinearConfig::new(3, 2).init(&device))?;
    /// accelerator.save_model(&model, &path)?;
    ///
    /// let other: Linear = LinearConfig::new(3, 2).init(&device);
    /// let other = accelerator.load_model(other, &path)?;
    /// assert_eq!(other.weight.val().into_data(), model.weight.val().into_data());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] on every rank when rank 0 could not write; [`Error::is_model`] for a
    /// parameter that such files cannot hold; [`Error::is_drift`] on every rank if the parameters of a prepared
    /// model are no longer [the same](Self::check_replicas) on all of them; [`Error::is_misuse`] in the middle of
    /// [local steps](crate::local), where each rank has another model; [`Error::is_collective`] when
    /// another rank is lost.
    #[track_caller]
    pub fn save_model<M: Module + 'static>(&self, model: &M, path: impl AsRef<Path>) -> Result<()> {
        self.save_model_with(model, path, &SaveOptions::new())
    }

    /// Saves a model like [`save_model`](Self::save_model), in the layout and the sizes of `options`.
    ///
    /// If the model does not fit in one file, `path` names the whole: for
    /// `models/model.safetensors` there are `models/model-00001-of-00003.safetensors`, …, and
    /// `models/model.safetensors.index.json`. All files are written under other names first; the
    /// index takes its place last. Files of an older save under the same name are then removed. With
    /// [`SaveOptions::with_max_shard_size`], a symbolic link at `path` is replaced, not followed.
    ///
    /// ```
    /// use accelerator::model::{FileLayout, SaveOptions};
    /// # use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Tensor;
    /// # let accelerator = Accelerator::new()?;
    /// # let device = accelerator.device();
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let folder = folder.path();
    ///
    /// let options = SaveOptions::new().with_layout(FileLayout::PyTorch).with_max_shard_size(8);
    /// accelerator.save_model_with(&model, folder.join("model.safetensors"), &options)?;
    /// assert!(folder.join("model.safetensors.index.json").is_file());
    /// // The files say which layout they have.
    /// let other = accelerator.load_model(LinearConfig::new(2, 1).init(&device), folder)?;
    /// assert_eq!(other.weight.val().into_data(), model.weight.val().into_data());
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`save_model`](Self::save_model).
    #[track_caller]
    pub fn save_model_with<M: Module + 'static>(
        &self,
        model: &M,
        path: impl AsRef<Path>,
        options: &SaveOptions,
    ) -> Result<()> {
        let (reduction, tracking) = (&self.shared.reduction, &self.shared.tracking);
        replicas::check_and_sync(reduction, tracking, "save the model", model)?;
        let known = reduction.models.find(model).ok();
        let trained = known.map(|known| known.parameters().iter().map(|known| known.id).collect());
        let (context, path) = (&self.shared.context, path.as_ref());
        model::save(context, model, path, options, trained.as_ref())
    }

    /// Loads the values of a safetensors file, or of a set of files with an index, into the model. Rank 0 reads, and
    /// the others get its values and parameter ids. A prepared model stays prepared.
    ///
    /// `path` is the file, the index, a folder with `model.safetensors` or `model.safetensors.index.json`, such as a
    /// checkpoint, a folder with [PEFT's files](crate::model::FileLayout::Peft), or a folder of checkpoints, of which the
    /// newest good one is read. The file must fit the model: see
    /// [`load_model_with`](Self::load_model_with) for files of other programs and other models.
    ///
    /// In a checkpoint, the manifest lists the files of the model, and each is checked against its hash; a file that
    /// the manifest does not list is read only if `path` names that file.
    ///
    /// # Errors
    ///
    /// [`Error::is_model`] on every rank when the file does not fit, with what is missing,
    /// unexpected, misshapen or of another type, or when the model differs between ranks;
    /// [`Error::is_io`] when a file cannot be read or is damaged, and [`Error::is_checkpoint`] when its checkpoint is
    /// damaged; [`Error::is_collective`] when another rank is lost.
    #[track_caller]
    pub fn load_model<M: Module + 'static>(&self, model: M, path: impl AsRef<Path>) -> Result<M> {
        let (model, _) = self.load_model_with(model, path, &LoadOptions::new())?;
        Ok(model)
    }

    /// Loads a model like [`load_model`](Self::load_model), with the names, the layout and the
    /// exceptions of `options`. Every rank gets the report of rank 0.
    ///
    /// A parameter that the file lacks gets rank 0's value on every rank, as in
    /// [`prepare`](Self::prepare).
    ///
    /// ```
    /// use accelerator::model::LoadOptions;
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// # fn main() -> accelerator::Result<()> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("model.safetensors");
    /// let accelerator = Accelerator::new()?;
    /// let device = accelerator.device();
    /// let trained: Linear = LinearConfig::new(3, 2).with_bias(false).init(&device);
    /// accelerator.save_model(&trained, &path)?;
    ///
    /// let model: Linear = LinearConfig::new(3, 2).init(&device);
    /// let options = LoadOptions::new().allow_partial();
    /// let (model, report) = accelerator.load_model_with(model, &path, &options)?;
    /// assert_eq!(report.loaded, ["weight"]);
    /// assert_eq!(report.missing, ["bias"]);
    /// # let _ = model;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`load_model`](Self::load_model); what `options` allow is none.
    /// [`Error::is_config`] when renaming gives two tensors one name.
    #[track_caller]
    pub fn load_model_with<M: Module + 'static>(
        &self,
        model: M,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<(M, LoadReport)> {
        let model = BoxedModule::new(model);
        let (model, report) = self.load_boxed(model, path.as_ref(), options)?;
        Ok((model.into_model(), report))
    }

    /// Writes a value to `path` as JSON, once for all ranks: rank 0 writes, and the others learn whether it
    /// succeeded. The file appears whole or not at all. JSON has `null` for a number that is not finite. For tensors,
    /// use [models](Self::save_model) and [checkpoints](Self::save_state).
    ///
    /// ```
    /// # fn main() -> accelerator::Result<()> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("metrics.json");
    /// let accelerator = accelerator::Accelerator::new()?;
    /// accelerator.save(&("accuracy", 0.75), &path)?;
    /// assert_eq!(std::fs::read_to_string(&path)?, "[\"accuracy\",0.75]");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_io`](crate::Error::is_io) on every rank when rank 0 could not write, or the value is none that JSON
    /// holds; [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    #[track_caller]
    pub fn save<T: Serialize>(&self, value: &T, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let failed = |error| Error::io("write the value to", path, error);
        let work = || write_json(value, path).map_err(failed);
        self.shared
            .context
            .on_main("save the value", work)
            .map(drop)
    }

    #[track_caller]
    fn load_boxed(
        &self,
        model: BoxedModule,
        path: &Path,
        options: &LoadOptions,
    ) -> Result<(BoxedModule, LoadReport)> {
        let open = |activity| checkpoint::open_model(path, activity);
        model::load_on_all(&self.shared.context, model, open, options, None)
    }
}

fn write_json<T: Serialize>(value: &T, path: &Path) -> io::Result<()> {
    Replace::new(path, Durability::Flushed)
        .private()
        .write(|file| Ok(serde_json::to_writer(file, value)?))
}
