//! Values of options: names of jobs, amounts of memory and time, files of an image.

use std::fmt;
#[cfg(feature = "image")]
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A name that every engine accepts: a label of RFC 1123, as in Kubernetes, of at most 40 characters, so that names of pods
/// and Services that begin with it fit as well.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct JobName(String);

const LONGEST_NAME: usize = 40;

impl JobName {
    /// Returns the name as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for JobName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let begins = text.starts_with(|c: char| c.is_ascii_lowercase());
        let fits = text.len() <= LONGEST_NAME
            && text.chars().all(is_inner)
            && begins
            && !text.ends_with('-');
        match fits {
            true => Ok(Self(text.to_owned())),
            false => Err(format!(
                "expected a name of lower-case letters, digits and '-', which begins with a letter, does not end with \
                 '-', and has at most {LONGEST_NAME} characters, such as \"mnist-2\""
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

/// An amount of memory in bytes: `16Gi`, `16GiB`, `16G`, `512M`; a number alone is bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Memory(u64);

impl Memory {
    #[cfg(any(feature = "kubernetes", feature = "ray"))]
    pub(crate) fn bytes(self) -> u64 {
        self.0
    }

    /// Returns the amount in mebibytes, rounded up, as Slurm takes it.
    #[cfg(any(feature = "slurm", test))]
    pub(crate) fn mebibytes(self) -> u64 {
        self.0.div_ceil(1 << 20)
    }
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "expected an amount of memory, such as 16Gi, 512M or 2T".to_owned();
        let digits = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
        let unit: u64 = match &text[digits..] {
            "" => 1,
            "K" | "k" | "KB" => 1000,
            "M" | "MB" => 1_000_000,
            "G" | "GB" => 1_000_000_000,
            "T" | "TB" => 1_000_000_000_000,
            "Ki" | "KiB" => 1 << 10,
            "Mi" | "MiB" => 1 << 20,
            "Gi" | "GiB" => 1 << 30,
            "Ti" | "TiB" => 1 << 40,
            _ => return Err(wrong()),
        };
        match number.checked_mul(unit) {
            Some(bytes) if bytes > 0 => Ok(Self(bytes)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Memory {
    /// Writes the amount as Kubernetes does: `16Gi`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
        let whole = units
            .into_iter()
            .find(|(bits, _)| self.0.is_multiple_of(1 << bits));
        match whole {
            Some((bits, unit)) => write!(formatter, "{}{unit}", self.0 >> bits),
            None => write!(formatter, "{}", self.0),
        }
    }
}

/// Ten years, in seconds.
const LONGEST_TIME: u64 = 10 * 366 * 24 * 3600;

/// Parses a time limit: `90m`, `2h 30m`, or Slurm's `[DAYS-]HOURS:MINUTES:SECONDS`.
pub(crate) fn time_limit(text: &str) -> Result<Duration, String> {
    let limit = match text.contains(':') {
        true => clock(text),
        false => humantime::parse_duration(text).ok(),
    };
    limit.filter(|limit| (1..=LONGEST_TIME).contains(&limit.as_secs())).ok_or_else(|| {
        "expected a time from a second to ten years, such as 90m, 2h or 1-12:00:00 (days-hours:minutes:seconds)".to_owned()
    })
}

fn clock(text: &str) -> Option<Duration> {
    let (days, rest) = match text.split_once('-') {
        Some((days, rest)) => (days.parse::<u64>().ok()?, rest),
        None => (0, text),
    };
    let parts: Vec<u64> = rest
        .split(':')
        .map(|part| part.parse().ok())
        .collect::<Option<_>>()?;
    let [hours, minutes, seconds] = parts[..] else {
        return None;
    };
    let hours = days.checked_mul(24)?.checked_add(hours)?;
    let minutes = hours.checked_mul(60)?.checked_add(minutes)?;
    Some(Duration::from_secs(
        minutes.checked_mul(60)?.checked_add(seconds)?,
    ))
}

/// Parses a file or folder and its name in the image: `PATH[:DEST]`.
#[cfg(feature = "image")]
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

    #[test]
    fn memory_is_read_and_written() {
        for (text, bytes, written) in [
            ("16Gi", 16 << 30, "16Gi"),
            ("1024MiB", 1 << 30, "1Gi"),
            ("5", 5, "5"),
            ("2G", 2_000_000_000, "1953125Ki"),
        ] {
            let memory: Memory = text.parse().unwrap();
            assert_eq!((memory.0, memory.to_string().as_str()), (bytes, written));
        }
        for text in ["", "0", "G", "1.5G", "-1", "16Gb ", "99999999Ti"] {
            assert!(text.parse::<Memory>().is_err(), "{text}");
        }
        assert_eq!("1500Ki".parse::<Memory>().unwrap().mebibytes(), 2);
    }

    #[test]
    fn limits_are_read() {
        for (text, seconds) in [
            ("90m", 5400),
            ("2h 30m", 9000),
            ("1-12:00:00", 129_600),
            ("00:01:30", 90),
        ] {
            assert_eq!(
                time_limit(text).map(|limit| limit.as_secs()),
                Ok(seconds),
                "{text}"
            );
        }
        for text in [
            "9999999999999999999s",
            "11y",
            "",
            "0s",
            "5",
            "1:2",
            "a:b:c",
            "-1m",
        ] {
            assert!(time_limit(text).is_err(), "{text}");
        }
    }
}
