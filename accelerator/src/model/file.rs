use std::io::Write;
use std::path::Path;

use burn::module::Module;
use burn::store::{ModuleSnapshot, SafetensorsStore};

use crate::accelerator::Accelerator;
use crate::error::{Error, Kind, Result};

/// Models on disk, as safetensors.
impl Accelerator {
    /// Writes the model to `path`, by parameter path, once for all ranks: rank 0 writes, the
    /// others learn how it went. The file appears whole or not at all.
    ///
    /// Parameters have the shapes that Burn gives them (a `Linear` weight is `[in, out]`).
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] on every rank when rank 0 could not write;
    /// [`Error::is_collective`] when another rank is lost.
    #[track_caller]
    pub fn save_model<M: Module>(&self, model: &M, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let outcome = self
            .on_main_process(|| write(model, path))
            .unwrap_or(Ok(()));
        let message = outcome.as_ref().err().map(|error| format!("{error:?}"));
        let message = self.broadcast_object(&message, 0)?;
        outcome?;
        message.map_or(Ok(()), |message| {
            Err(Error::new(
                Kind::Io,
                format!("rank 0 failed to save the model: {message}"),
            ))
        })
    }

    /// Reads the model's parameters from a safetensors file that [`save_model`](Self::save_model)
    /// wrote. Every rank reads; load before [`prepare`](Self::prepare), or prepare again.
    ///
    /// # Errors
    ///
    /// [`Error::is_model`] when the file lacks a parameter or has it in another shape, naming
    /// it; [`Error::is_io`] when it cannot be read.
    pub fn load_model<M: Module>(&self, mut model: M, path: impl AsRef<Path>) -> Result<M> {
        let path = path.as_ref();
        if let Err(error) = std::fs::File::open(path) {
            return Err(Error::io("open the model file", path, error));
        }
        let result = model
            .load_from(&mut SafetensorsStore::from_file(path))
            .map_err(|error| {
                Error::with_source(
                    Kind::Model,
                    format!(
                        "the model file `{}` does not fit this model",
                        path.display()
                    ),
                    error.to_string(),
                )
            })?;
        if let Some(extra) = result.unused.first() {
            return Err(Error::new(
                Kind::Model,
                format!(
                    "the model file `{}` has `{extra}`, which this model has not ({} such)",
                    path.display(),
                    result.unused.len()
                ),
            ));
        }
        Ok(model)
    }
}

fn write<M: Module>(model: &M, path: &Path) -> Result<()> {
    let mut store = SafetensorsStore::from_bytes(None);
    // `valid` brings running statistics up to date, which are a step behind otherwise.
    let bytes = model
        .valid()
        .save_into(&mut store)
        .and_then(|()| store.get_bytes())
        .map_err(|error| {
            Error::with_source(
                Kind::Model,
                "the model cannot be written as safetensors",
                error.to_string(),
            )
        })?;
    replace_file(path, &bytes).map_err(|error| Error::io("write the model to", path, error))
}

/// Puts a file in the place of another, whole or not at all. A symbolic link stays and its target
/// is replaced; what is not a regular file is refused.
///
/// The temporary file lies in the same folder, so that renaming is atomic. It always has the same
/// name, so that what an interrupted save leaves is overwritten by the next one.
fn replace_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let target = match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            return Err(std::io::Error::other("it is there and not a regular file"));
        }
        Ok(_) => path.canonicalize()?,
        Err(_) => path.to_owned(),
    };
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let temporary = target.with_file_name(format!(".{name}.partial"));
    let written = std::fs::File::create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, &target)
    });
    if written.is_err() {
        // Best effort: the error of the write is the one to report.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}
