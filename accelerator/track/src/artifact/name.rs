//! Names of artifacts, of their versions and of files in them.

use std::fmt;

use crate::error::{Error, Kind, Result};

/// The name of an artifact, which is the name of a folder too.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct ArtifactName(String);

impl ArtifactName {
    pub(super) fn parse(name: &str) -> Result<Self> {
        check("an artifact", name)?;
        Ok(Self(name.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ArtifactName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A name that a version has beside its number, and that can move to another.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Alias(String);

impl Alias {
    pub(super) fn parse(alias: &str) -> Result<Self> {
        check("an alias", alias)?;
        if alias == LATEST || parse_version(alias).is_some() {
            return Err(Error::new(
                Kind::Misuse,
                format!(
                    "{alias:?} cannot be set as an alias: {LATEST:?} is the greatest version, and \"v1\" the first; choose another"
                ),
            ));
        }
        Ok(Self(alias.to_owned()))
    }

    pub(super) fn into_string(self) -> String {
        self.0
    }
}

/// `name`, `name:latest`, `name:v3` or `name:alias`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Query {
    pub(super) name: ArtifactName,
    pub(super) version: VersionQuery,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum VersionQuery {
    Latest,
    Number(u32),
    Alias(String),
}

impl Query {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (name, version) = text.rsplit_once(':').unwrap_or((text, LATEST));
        let version = match parse_version(version) {
            Some(number) => VersionQuery::Number(number),
            None if version == LATEST => VersionQuery::Latest,
            None => VersionQuery::Alias(Alias::parse(version)?.into_string()),
        };
        Ok(Self {
            name: ArtifactName::parse(name)?,
            version,
        })
    }
}

/// The number of `v3`; only as it is written, so that no two texts are one number.
pub(super) fn parse_version(text: &str) -> Option<u32> {
    let number: u32 = text.strip_prefix('v')?.parse().ok()?;
    (number > 0 && text == format!("v{number}")).then_some(number)
}

/// Whether this is a path within an artifact: parts with `/` between, none of which leads elsewhere.
pub(super) fn check_path(path: &str) -> Result<()> {
    // `\` and, on some systems, `:` separate parts too, and an artifact is read on other systems.
    let is_special = |x: char| x.is_control() || x == '\\' || (cfg!(windows) && x == ':');
    let defect = if path.is_empty() {
        "it is empty"
    } else if path.contains(is_special) {
        "it has a control character or a `\\`"
    } else if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        "a part of it is empty, `.` or `..`"
    } else {
        return Ok(());
    };
    Err(Error::new(
        Kind::Misuse,
        format!(
            "{path:?} is no path of a file in an artifact: {defect}; expected one such as \"weights/model.safetensors\""
        ),
    ))
}

const LATEST: &str = "latest";

/// The most bytes of a name: names of files have 255.
const LONGEST: usize = 128;

fn check(what: &str, name: &str) -> Result<()> {
    let is_special = |x: char| {
        x.is_control()
            || matches!(
                x,
                '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|' | '%'
            )
    };
    let defect = if name.is_empty() {
        "it is empty"
    } else if name.len() > LONGEST {
        "it has more than 128 bytes"
    } else if name.contains(is_special) {
        "it has a control character or one of / \\ : * ? \" < > | %"
    } else if name.starts_with(['.', '-', ' ']) || name.ends_with(['.', ' ']) {
        "it begins with `.`, `-` or a space, or ends with `.` or a space"
    } else {
        return Ok(());
    };
    let shown: String = name.chars().take(LONGEST).collect();
    Err(Error::new(
        Kind::Misuse,
        format!("{shown:?} is no name for {what}: {defect}; expected one such as \"mnist-model\""),
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let long = "x".repeat(129);
        for name in [
            "", ".", "..", "/", "a/b", "../a", "a\\b", "C:", "a:b", ".hidden", "-a", "a ", "a.",
            "a\0", "a\nb", "50%", &long,
        ] {
            assert!(
                ArtifactName::parse(name).unwrap_err().is_misuse(),
                "{name:?}"
            );
        }
        for name in ["a", "mnist_model", "模型 é", "a..b", &long[..128]] {
            assert_eq!(ArtifactName::parse(name).unwrap().as_str(), name);
        }
        for alias in ["latest", "v1", "v30", "a/b", ""] {
            assert!(Alias::parse(alias).unwrap_err().is_misuse(), "{alias:?}");
        }
        for alias in ["best", "v", "v0", "v01", "v+1", "version"] {
            assert!(Alias::parse(alias).is_ok(), "{alias:?}");
        }
    }

    #[test]
    fn queries_name_a_version() {
        for (text, version) in [
            ("model", VersionQuery::Latest),
            ("model:latest", VersionQuery::Latest),
            ("model:v12", VersionQuery::Number(12)),
            ("model:best", VersionQuery::Alias("best".to_owned())),
        ] {
            let query = Query::parse(text).unwrap();
            assert_eq!((query.name.as_str(), query.version), ("model", version));
        }
        for text in ["", ":", "model:", ":v1", "a:b:v1", "model:../x"] {
            assert!(Query::parse(text).unwrap_err().is_misuse(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn no_path_leaves_its_artifact(path in "[a-b./\\\\:]{0,8}|.{0,40}") {
            if check_path(&path).is_ok() {
                let path = std::path::Path::new(&path);
                prop_assert!(path.components().all(|x| matches!(x, std::path::Component::Normal(_))));
            }
        }
    }
}
