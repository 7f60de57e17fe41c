use std::io::{self, ErrorKind};
use std::path::Path;

use burn::store::{ModuleSnapshot, SafetensorsStore};

use crate::error::{Error, Kind, Result};

/// Writes the parameters of the model to a safetensors file, each under its path in the model; replaces an existing
/// file.
///
/// # Errors
///
/// [`Error::is_io`] if the file cannot be written.
pub fn save_model(model: &impl ModuleSnapshot, path: &Path) -> Result<()> {
    let mut store = SafetensorsStore::from_file(path).overwrite(true);
    model.save_into(&mut store).map_err(|error| {
        Error::with_source(
            Kind::Io,
            format!(
                "cannot save the model to `{}`; check the path, its permissions and the space left",
                path.display()
            ),
            error,
        )
    })
}

/// Checks that a file can be created at the path, without touching an existing one.
pub(crate) fn check_target(path: &Path) -> Result<()> {
    let refuse = |error| Err(Error::io("save to", path, error));
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            return refuse(io::Error::other("it is there and not a regular file"));
        }
        _ if !parent.is_dir() => {
            return refuse(io::Error::new(
                ErrorKind::NotFound,
                "its folder does not exist",
            ));
        }
        _ => {}
    }
    // The only way to find out what permissions and file systems allow is to try.
    let name = format!(".accelerate-probe-{}", std::process::id());
    let probe = parent.join(name);
    match std::fs::File::create(&probe).and_then(|_| std::fs::remove_file(&probe)) {
        Ok(()) => Ok(()),
        Err(error) => refuse(error),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::CnnConfig;

    #[test]
    fn a_saved_model_loads_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let device = Device::default();
        let model = CnnConfig::new().init(&device.clone().autodiff());
        save_model(&model, &path).unwrap();
        save_model(&model, &path).unwrap();

        let mut other = CnnConfig::new().init(&device);
        let loaded = other
            .load_from(&mut SafetensorsStore::from_file(&path))
            .unwrap();
        assert!(
            loaded.missing.is_empty() && loaded.unused.is_empty(),
            "{loaded:?}"
        );
        let input = burn::tensor::Tensor::ones([1, 1, 28, 28], &device);
        let both = [other.forward(input.clone()), {
            use burn::module::Module;
            model.valid().forward(input)
        }];
        both[0].to_data().assert_eq(&both[1].to_data(), true);
    }

    #[test]
    fn a_target_that_cannot_be_made_is_found_out_before_training() {
        let dir = tempfile::tempdir().unwrap();
        check_target(&dir.path().join("model.safetensors")).unwrap();
        check_target(Path::new("model.safetensors")).unwrap();
        assert!(check_target(dir.path()).unwrap_err().is_io());
        let error = check_target(&dir.path().join("no/model.safetensors")).unwrap_err();
        assert!(error.is_io());
        assert!(
            error.to_string().contains("no/model.safetensors"),
            "{error}"
        );
    }
}
