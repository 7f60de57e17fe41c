//! Names of files within a checkpoint.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};

/// The name of a file within a checkpoint: `model.safetensors`, `ranks/00001.json`.
///
/// It is relative, has at most one folder, and cannot lead out of the checkpoint; it is UTF-8 of at
/// most 128 bytes, with `/` between its parts on every system.
///
/// ```
/// use accelerator_manifest::FileName;
///
/// let name: FileName = "model.safetensors".parse()?;
/// assert_eq!(name.as_str(), "model.safetensors");
/// assert!("../model".parse::<FileName>().unwrap_err().is_name());
/// # Ok::<(), accelerator_manifest::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileName(String);

impl FileName {
    /// The most bytes of a name.
    pub(crate) const LONGEST: usize = 128;

    /// Reads a name.
    ///
    /// # Errors
    ///
    /// [`Error::is_name`], whose message says what is not allowed.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        match defect(&name) {
            None => Ok(Self(name)),
            Some(defect) => {
                let shown: String = name.chars().take(Self::LONGEST).collect();
                let message = format!(
                    "{shown:?} is no name for a file of a checkpoint: {defect}; expected a name \
                     such as \"model.safetensors\" or \"ranks/00001.json\""
                );
                Err(Error::new(Kind::Name, message))
            }
        }
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The folder within the checkpoint, where the name has one.
    #[must_use]
    pub fn folder(&self) -> Option<&str> {
        self.0.split_once('/').map(|(folder, _)| folder)
    }

    /// The path of the file, for a checkpoint at `root`.
    pub(crate) fn at(&self, root: &Path) -> PathBuf {
        self.0
            .split('/')
            .fold(root.to_owned(), |path, part| path.join(part))
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for FileName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<String> for FileName {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        Self::new(name)
    }
}

impl From<FileName> for String {
    fn from(name: FileName) -> Self {
        name.0
    }
}

/// The name that this crate keeps for itself.
pub(crate) const MANIFEST: &str = "manifest.json";

fn defect(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("it is empty");
    }
    if name.len() > FileName::LONGEST {
        return Some("it has more than 128 bytes");
    }
    // `\` and `:` are separators on some systems, and a checkpoint may be read on another one.
    if name.contains(|x: char| x.is_control() || x == '\\' || x == ':') {
        return Some("it has a control character, a `\\` or a `:`");
    }
    let parts = name.split('/');
    if parts.clone().count() > 2 {
        return Some("it starts with `/`, or has more than one folder");
    }
    for part in parts {
        match part {
            "" => return Some("a part of it is empty"),
            _ if part.eq_ignore_ascii_case(MANIFEST) => {
                return Some("the manifest has that name");
            }
            "." | ".." => return Some("`.` and `..` lead elsewhere"),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::path::Component;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let long = "x".repeat(129);
        for name in [
            "",
            ".",
            "..",
            "/",
            "/etc/passwd",
            "a/",
            "/a",
            "a//b",
            "../a",
            "a/..",
            "a/../b",
            "a/b/c",
            "a\0b",
            "a\nb",
            "C:\\a",
            "c:a",
            "manifest.json",
            "manifest.json/a",
            "Manifest.JSON",
            long.as_str(),
        ] {
            assert!(FileName::new(name).unwrap_err().is_name(), "{name:?}");
        }
        for name in [
            "a",
            ".hidden",
            "a..b",
            "ranks/00001.json",
            "ü",
            &long[..128],
        ] {
            assert_eq!(FileName::new(name).unwrap().as_str(), name);
        }
    }

    proptest! {
        #[test]
        fn no_name_leaves_its_folder(name in "[a-b./\\\\:]{0,8}|.{0,140}") {
            if let Ok(name) = FileName::new(name) {
                let path = name.at(Path::new("root"));
                let parts: Vec<_> = path.components().collect();
                prop_assert!(parts.len() == 2 || parts.len() == 3);
                prop_assert!(parts.iter().all(|x| matches!(x, Component::Normal(_))));
                prop_assert_eq!(serde_json::from_str::<FileName>(&serde_json::to_string(&name).unwrap()).unwrap(), name);
            }
        }
    }
}
