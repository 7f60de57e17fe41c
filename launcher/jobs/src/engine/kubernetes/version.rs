//! The version of a server, and what it knows.

use std::fmt;

use k8s_openapi::apimachinery::pkg::version::Info;

/// The version of an API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ServerVersion {
    major: u32,
    minor: u32,
}

impl ServerVersion {
    /// Where nothing else is known.
    pub(super) const CURRENT: Self = Self::new(1, 33);

    /// A version.
    pub(super) const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// What a server says of itself. Some say `20+`.
    pub(super) fn read(info: &Info) -> Self {
        let number = |text: &str| {
            let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
            digits.parse().ok()
        };
        match (number(&info.major), number(&info.minor)) {
            (Some(major), Some(minor)) => Self::new(major, minor),
            _ => Self::CURRENT,
        }
    }

    /// Whether a Job can number its pods. Servers before drop the field and say nothing.
    pub(super) fn has_indexed_jobs(self) -> bool {
        self >= Self::new(1, 22)
    }

    /// Whether a Job can tell failures apart.
    pub(super) fn has_pod_failure_policy(self) -> bool {
        self >= Self::new(1, 31)
    }
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared() {
        let read = |major: &str, minor: &str| {
            ServerVersion::read(&Info {
                major: major.to_owned(),
                minor: minor.to_owned(),
                ..Info::default()
            })
        };
        assert_eq!(read("1", "20+"), ServerVersion::new(1, 20));
        assert!(!read("1", "20").has_indexed_jobs());
        assert!(read("1", "22").has_indexed_jobs());
        assert!(!read("1", "30").has_pod_failure_policy());
        assert!(
            read("1", "31").has_pod_failure_policy() && read("2", "0").has_pod_failure_policy()
        );
        assert_eq!(read("", "x"), ServerVersion::CURRENT);
    }
}
