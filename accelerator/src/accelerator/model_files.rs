use std::io;
use std::path::Path;

use accelerator_host::fs::{Durability, Replace};
use burn::module::Module;
use serde::Serialize;

use super::Accelerator;
use crate::checkpoint;
use crate::core::error::{Error, Result};
use crate::model::{self, LoadOptions, LoadReport, SaveOptions};
use crate::replicas;

/// Models on disk, as safetensors.
impl Accelerator {
    /// Writes the model to `path`, by parameter path, once for all ranks: rank 0 writes, the
    /// others learn how it went. The file appears whole or not at all, also where several jobs save to one
    /// path: that of the last one stays. Running statistics are those
    /// of all ranks; see [`sync_buffers`](Self::sync_buffers).
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
    pub fn save_model<M: Module>(&self, model: &M, path: impl AsRef<Path>) -> Result<()> {
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
    pub fn save_model_with<M: Module>(
        &self,
        model: &M,
        path: impl AsRef<Path>,
        options: &SaveOptions,
    ) -> Result<()> {
        let (reduction, tracking) = (&self.shared.reduction, &self.shared.tracking);
        replicas::check_and_sync(reduction, tracking, "save the model", model)?;
        model::save(&self.shared.context, model, path.as_ref(), options)
    }

    /// Gives the model the values of a safetensors file, or of a set of them with an index. Rank
    /// 0 reads, and the others get its values and parameter ids. A model that was prepared stays
    /// prepared.
    ///
    /// `path` is the file, the index, or a folder with `model.safetensors` or
    /// `model.safetensors.index.json`. The file must fit the model: see
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
    pub fn load_model<M: Module>(&self, model: M, path: impl AsRef<Path>) -> Result<M> {
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
    pub fn load_model_with<M: Module>(
        &self,
        model: M,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<(M, LoadReport)> {
        let open = |activity| checkpoint::open_model(path.as_ref(), activity);
        model::load_on_all(&self.shared.context, model, open, options, None)
    }

    /// Writes a value to `path` as JSON, once for all ranks: rank 0 writes, the others learn how it went. The file
    /// appears whole or not at all. A number that is not finite is `null` in JSON; tensors go into
    /// [models](Self::save_model) and [checkpoints](Self::save_state).
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
}

fn write_json<T: Serialize>(value: &T, path: &Path) -> io::Result<()> {
    Replace::new(path, Durability::Flushed)
        .private()
        .write(|file| Ok(serde_json::to_writer(file, value)?))
}
