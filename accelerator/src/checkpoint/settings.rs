use core::fmt;
use core::num::NonZeroUsize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use accelerator_track::Runs;

use super::position::{Rescale, WorldChange};
use super::saving::Saved;
use crate::core::error::{self, Error, Result};

/// A folder of checkpoints, and the rules by which they are kept. Methods that take a `Checkpoints` also take a path.
#[derive(Clone)]
#[must_use]
pub struct Checkpoints {
    path: PathBuf,
    total_limit: Option<usize>,
    protected: Vec<PathBuf>,
    pub(super) max_shard_size: u64,
    pub(super) frozen: FrozenParameters,
    before_save: Vec<Arc<Callback>>,
    after_resume: Vec<Arc<Callback>>,
    rescale: Option<Arc<RescaleRule>>,
}

/// The content of checkpoints as to parameters that no training changes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum FrozenParameters {
    Saved,
    LeftOut,
}

type RescaleRule = dyn Fn(&WorldChange) -> Rescale + Send + Sync;

type Callback = dyn Fn(&Saved) -> Result<(), CallbackError> + Send + Sync;

type CallbackError = Box<dyn std::error::Error + Send + Sync>;

impl Checkpoints {
    /// Names the folder `path`, which is created when the first checkpoint is saved. Only rank 0 needs access to it.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            total_limit: None,
            protected: Vec::new(),
            max_shard_size: 0,
            frozen: FrozenParameters::Saved,
            before_save: Vec::new(),
            after_resume: Vec::new(),
            rescale: None,
        }
    }

    /// Sets how many checkpoints are kept, at least 1: when a new one is complete, the oldest are removed.
    /// Checkpoints that lack a file, or have a file of another size, neither count nor are removed. Contents are not
    /// read, so a checkpoint whose bytes changed in place counts, and is removed when it is the oldest. Checkpoints
    /// of an [emergency](crate::Accelerator::save_emergency) do not count, and are removed once this many others are
    /// newer. Default: all.
    pub fn with_total_limit(mut self, checkpoints: usize) -> Self {
        self.total_limit = Some(checkpoints);
        self
    }

    /// Keeps the checkpoint at that path, such as the best one: [the limit](Self::with_total_limit) counts it and never
    /// removes it. However the path is written, it must lead into the folder of these checkpoints; otherwise a save
    /// fails.
    ///
    /// ```
    /// # use accelerator::prelude::*;
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let folder = folder.path();
    /// # let accelerator = Accelerator::new()?;
    /// let best = accelerator.save_state(folder, Object(&1))?;
    /// let checkpoints = Checkpoints::new(folder).with_total_limit(2).with_protected(best.path());
    /// for state in 2..=4 {
    ///     accelerator.save_state(&checkpoints, Object(&state))?;
    /// }
    /// assert!(best.path().exists());
    /// # Ok::<(), Error>(())
    /// ```
    pub fn with_protected(mut self, path: impl Into<PathBuf>) -> Self {
        self.protected.push(path.into());
        self
    }

    pub(super) fn is_protected(&self, checkpoint: &Path) -> Result<bool> {
        let Some(checkpoint) = resolved(checkpoint)? else {
            return Ok(false);
        };
        for path in &self.protected {
            if resolved(path)?.is_some_and(|path| path == checkpoint) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Tells if that path leads into the folder: its target may be gone.
    pub(crate) fn holds(&self, path: &Path) -> Result<bool> {
        let Some(parent) = path.parent() else {
            return Ok(false);
        };
        match (resolved(parent)?, resolved(&self.path)?) {
            (Some(parent), Some(folder)) => Ok(parent == folder),
            // A folder that is not there yet is known by its name alone.
            _ => Ok(absolute(parent)? == absolute(&self.path)?),
        }
    }

    /// Splits models into files of at most `bytes` bytes, with an index that Hugging Face's tools read. A single
    /// parameter is never split. Default, and 0: one file.
    pub fn with_max_shard_size(mut self, bytes: u64) -> Self {
        self.max_shard_size = bytes;
        self
    }

    /// Leaves frozen parameters, such as the base of LoRA adapters, out of checkpoints, which store a hash of each instead:
    /// they are as small as the adapters. [`resume`](crate::Accelerator::resume) takes the values from the model that you
    /// pass and fails if they differ from those used in training, so load the base first. By default, frozen parameters
    /// are saved.
    ///
    /// Frozen parameters must still have the values of the base. Any that were trained before would be lost when older
    /// checkpoints are deleted. Each save reads and hashes the frozen parameters.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::module::{Lora, Module};
    /// use burn::nn::{Linear, LinearConfig};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let (base, checkpoints) = (folder.path().join("base.safetensors"), folder.path().join("checkpoints"));
    /// # let accelerator = Accelerator::new()?;
    /// # let init = || -> Linear { LinearConfig::new(8, 4).init(&accelerator.device()) };
    /// # accelerator.save_model(&init(), &base)?;
    /// let model = accelerator.load_model(init(), &base)?.apply_lora(Lora::new(2, 4.0));
    /// let checkpoints = Checkpoints::new(checkpoints).without_frozen_parameters();
    /// let (model, position) = accelerator.resume(&checkpoints, accelerator.prepare(model)?)?;
    /// // … training …
    /// accelerator.save_state(&checkpoints, &model)?;
    /// # assert!(position.is_start());
    /// # Ok::<(), Error>(())
    /// ```
    pub fn without_frozen_parameters(mut self) -> Self {
        self.frozen = FrozenParameters::LeftOut;
        self
    }

    /// Runs `hook` on rank 0 before each checkpoint is completed. Files that it writes into
    /// [`Saved::path`] become part of the checkpoint: hashed, and verified before a resume.
    ///
    /// A failure gives the checkpoint up. It must call no collective, which the other ranks would
    /// not join. With [`save_state_async`](crate::Accelerator::save_state_async), it runs on another
    /// thread, beside training.
    pub fn before_save(
        mut self,
        hook: impl Fn(&Saved) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        self.before_save.push(Arc::new(hook));
        self
    }

    /// Runs `hook` on rank 0 when everything is loaded from a checkpoint, for example to read files that
    /// [`before_save`](Self::before_save) added. If it fails, the resume fails on every rank.
    ///
    /// ```
    /// # use accelerator::prelude::*;
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let folder = folder.path();
    /// # let accelerator = Accelerator::new()?;
    /// let checkpoints = Checkpoints::new(folder)
    ///     .before_save(|draft| {
    ///         Ok(std::fs::write(draft.path().join("number"), draft.number().to_string())?)
    ///     })
    ///     .after_resume(|resumed| {
    ///         let number = std::fs::read_to_string(resumed.path().join("number"))?;
    ///         assert_eq!(number, resumed.number().to_string());
    ///         Ok(())
    ///     });
    /// accelerator.save_state(&checkpoints, Object(&1))?;
    /// accelerator.resume(&checkpoints, Object(0))?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn after_resume(
        mut self,
        hook: impl Fn(&Saved) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        self.after_resume.push(Arc::new(hook));
        self
    }

    /// Sets the rule for a resume on another number of ranks. Rank 0 calls it, and only if the number has changed.
    /// Default: [`Rescale::keep_global_batch`].
    ///
    /// A batch size that was changed in the program takes precedence over the rule.
    ///
    /// ```
    /// use accelerator::checkpoint::Rescale;
    /// use accelerator::prelude::*;
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let folder = folder.path();
    ///
    /// launch(2, |accelerator| accelerator.save_state(folder, Object(&1)).map(drop))?;
    /// launch(3, |accelerator| {
    ///     let checkpoints = Checkpoints::new(folder).with_rescale(|change| {
    ///         // The same steps if the job shrank, larger ones if it grew.
    ///         match change.now < change.before {
    ///             true => Rescale::keep_global_batch(),
    ///             false => Rescale::keep_batch_per_rank()
    ///                 .with_learning_rate_factor(change.now as f64 / change.before as f64),
    ///         }
    ///     });
    ///     let (_, position) = accelerator.resume(checkpoints, Object(0))?;
    ///     assert_eq!(position.learning_rate_factor(), 1.5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn with_rescale(
        mut self,
        rule: impl Fn(&WorldChange) -> Rescale + Send + Sync + 'static,
    ) -> Self {
        self.rescale = Some(Arc::new(rule));
        self
    }

    pub(super) fn rescale(&self, change: &WorldChange) -> Rescale {
        self.rescale
            .as_ref()
            .map_or_else(Rescale::default, |rule| rule(change))
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks before a save begins that it can honor the settings.
    pub(super) fn check(&self) -> Result<()> {
        self.limit()?;
        for path in &self.protected {
            if !self.holds(path)? {
                return Err(Error::config(format!(
                    "with_protected: `{}` is not in `{}`, the folder of the checkpoints: protect those that were saved \
                     there",
                    path.display(),
                    self.path.display()
                )));
            }
        }
        Ok(())
    }

    /// Refuses the folder of a tracked run, whose files are not a checkpoint's.
    pub(super) fn check_folder(&self) -> Result<()> {
        match Runs::is_run(&self.path) {
            false => Ok(()),
            true => Err(Error::misuse(format!(
                "`{}` is the folder of a tracked run; keep checkpoints in another one, such as `checkpoints/NAME`, and \
                 move those that are here there",
                self.path.display()
            ))),
        }
    }

    pub(super) fn limit(&self) -> Result<Option<NonZeroUsize>> {
        let limit = |limit| {
            NonZeroUsize::new(limit).ok_or_else(|| {
                Error::config("with_total_limit: 0 checkpoints; expected at least 1")
            })
        };
        self.total_limit.map(limit).transpose()
    }

    pub(super) fn run_before_save(&self, draft: &Saved) -> Result<()> {
        run(&self.before_save, draft, || {
            format!("before checkpoint {}", draft.number)
        })
    }

    pub(super) fn run_after_resume(&self, resumed: &Saved) -> Result<()> {
        run(&self.after_resume, resumed, || {
            format!("after resuming from {}", resumed.path.display())
        })
    }

    pub(super) fn pass_over_after_resume(&self) {
        if !self.after_resume.is_empty() {
            error::warn(
                "hooks of `after_resume` do not run: training continues from the memory of the group before, to which \
                 hooks of `before_save` add no files; what they keep travels as an `Object`",
            );
        }
    }
}

fn run(hooks: &[Arc<Callback>], saved: &Saved, when: impl Fn() -> String) -> Result<()> {
    hooks.iter().try_for_each(|hook| {
        hook(saved).map_err(|error| {
            Error::checkpoint(format!("a hook that runs {} failed", when())).with_source(error)
        })
    })
}

impl From<&Self> for Checkpoints {
    fn from(checkpoints: &Self) -> Self {
        checkpoints.clone()
    }
}

fn resolved(path: &Path) -> Result<Option<PathBuf>> {
    let path = named(path);
    match path.canonicalize() {
        Ok(resolved) => Ok(Some(resolved)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("find", path, error)),
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    let path = named(path);
    std::path::absolute(path).map_err(|error| Error::io("find", path, error))
}

/// The parent of a bare name is the current folder.
fn named(path: &Path) -> &Path {
    match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    }
}

macro_rules! from_paths {
    ($($path:ty),+) => {
        $(impl From<$path> for Checkpoints {
            fn from(path: $path) -> Self {
                Self::new(path)
            }
        })+
    };
}

from_paths!(&str, String, &String, &Path, PathBuf, &PathBuf);

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoints")
            .field("path", &self.path)
            .field("total_limit", &self.total_limit)
            .field("protected", &self.protected)
            .field("max_shard_size", &self.max_shard_size)
            .finish_non_exhaustive()
    }
}
