//! Names of jobs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name that every engine takes: a label of RFC 1123, as Kubernetes has them, of at most 40 characters, so that names of
/// pods and Services that begin with it fit as well.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct JobName(String);

const LONGEST: usize = 40;

impl JobName {
    /// The name as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for JobName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let begins = text.starts_with(|c: char| c.is_ascii_lowercase());
        let fits =
            text.len() <= LONGEST && text.chars().all(is_inner) && begins && !text.ends_with('-');
        match fits {
            true => Ok(Self(text.to_owned())),
            false => Err(format!(
                "expected a name of lower-case letters, digits and '-', which begins with a letter, does not end with \
                 '-', and has at most {LONGEST} characters, such as \"mnist-2\""
            )),
        }
    }
}

impl TryFrom<String> for JobName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<JobName> for String {
    fn from(name: JobName) -> Self {
        name.0
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_labels() {
        for name in ["a", "mnist-2", &"a".repeat(40)] {
            assert_eq!(name.parse::<JobName>().unwrap().as_str(), name);
        }
        for name in [
            "",
            "-a",
            "a-",
            "A",
            "a_b",
            "a.b",
            "1a",
            "é",
            "a/b",
            "a b",
            &"a".repeat(41),
        ] {
            assert!(name.parse::<JobName>().is_err(), "{name}");
        }
    }
}
