//! What is put into an image of a program.

use std::path::{Path, PathBuf};

/// A file or folder, and its name in the image: `PATH[:DEST]`.
pub(crate) fn include(text: &str) -> Result<(PathBuf, String), String> {
    let (path, destination) = match text.split_once(':') {
        Some((path, destination)) => (path, destination.to_owned()),
        None => {
            let name = Path::new(text).file_name();
            let name = name.ok_or_else(|| format!("{text} has no name; give PATH:DEST"))?;
            (text, name.to_string_lossy().into_owned())
        }
    };
    match path.is_empty() || destination.is_empty() {
        true => Err("expected PATH or PATH:DEST".to_owned()),
        false => Ok((PathBuf::from(path), destination)),
    }
}
