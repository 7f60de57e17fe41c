//! Names within a folder of checkpoints.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

use super::{Folder, LATEST};
use crate::hash::ContentHash;

/// `checkpoint-000003`.
pub(crate) fn name_of(number: u64) -> String {
    format!("checkpoint-{number:06}")
}

/// The number of `checkpoint-000003`; only as [`name_of`] writes it, so that no two names are one
/// number.
pub(crate) fn parse_name(name: &str) -> Option<u64> {
    let number = name.strip_prefix("checkpoint-")?.parse().ok()?;
    let is_number = (1..=Folder::LARGEST).contains(&number) && name_of(number) == name;
    is_number.then_some(number)
}

/// `.checkpoint-000003.partial-<host>-<process>-<random>`: hidden, and with the name of its owner.
pub(crate) fn temporary(what: &str, state: State) -> String {
    let random = RandomState::new().build_hasher().finish();
    let (state, host, process) = (state.as_str(), host(), std::process::id());
    format!(".{what}.{state}-{host}-{process}-{random:016x}")
}

/// Why a thing has a temporary name.
#[derive(Clone, Copy)]
pub(crate) enum State {
    /// It is being written.
    Partial,
    /// It is being removed.
    Removed,
}

/// A temporary name, taken apart.
pub(crate) struct Leftover<'a> {
    host: &'a str,
    process: u32,
}

impl<'a> Leftover<'a> {
    /// `None` where the name is not one that [`temporary`] makes of ours.
    pub(crate) fn parse(name: &'a str) -> Option<Self> {
        let (what, rest) = name.strip_prefix('.')?.split_once('.')?;
        let rest = [State::Partial, State::Removed]
            .into_iter()
            .find_map(|x| rest.strip_prefix(x.as_str())?.strip_prefix('-'))?;
        let mut parts = rest.split('-');
        let (host, process, random) = (parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str| text.bytes().all(|x| matches!(x, b'0'..=b'9' | b'a'..=b'f'));
        let is_ours = (what == LATEST || parse_name(what).is_some())
            && parts.next().is_none()
            && (host.len(), random.len()) == (8, 16)
            && is_hex(host)
            && is_hex(random);
        let process: u32 = process.parse().ok()?;
        is_ours.then_some(Self { host, process })
    }

    /// Whether its owner was a process of this machine that does not exist any more. What cannot
    /// be known counts as alive.
    pub(crate) fn is_orphaned(&self) -> bool {
        self.host == host() && is_gone(self.process)
    }
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            Self::Partial => "partial",
            Self::Removed => "removed",
        }
    }
}

/// Tells machines apart, and containers of one machine, in which process ids mean other processes.
fn host() -> &'static str {
    static HOST: OnceLock<String> = OnceLock::new();
    HOST.get_or_init(|| {
        let mut hash = ContentHash::of(identity().as_bytes()).to_string();
        hash.truncate(8);
        hash
    })
}

#[cfg(unix)]
fn identity() -> String {
    let system = rustix::system::uname();
    let name = system.nodename().to_string_lossy();
    let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{name} {}", processes.display())
}

#[cfg(unix)]
fn is_gone(process: u32) -> bool {
    let pid = i32::try_from(process).ok();
    let answer = pid
        .and_then(rustix::process::Pid::from_raw)
        .map(rustix::process::test_kill_process);
    answer == Some(Err(rustix::io::Errno::SRCH))
}

#[cfg(not(unix))]
fn identity() -> String {
    "unknown".to_owned()
}

#[cfg(not(unix))]
fn is_gone(_process: u32) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_one_name_each() {
        for (name, number) in [
            ("checkpoint-000001", 1),
            ("checkpoint-999999", 999_999),
            ("checkpoint-1000000", 1_000_000),
        ] {
            assert_eq!(parse_name(name), Some(number));
            assert_eq!(name_of(number), name);
        }
        for name in [
            "checkpoint-000000",
            "checkpoint-1",
            "checkpoint-0000001",
            "checkpoint-+00001",
            "checkpoint-",
            "Checkpoint-000001",
            "checkpoint-000001 ",
            "checkpoint-1000000000000000000",
            "checkpoint-00000x",
            "latest",
        ] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn only_temporary_names_of_ours_are_leftovers() {
        let ours = temporary("checkpoint-000003", State::Partial);
        let leftover = Leftover::parse(&ours).unwrap();
        assert!(!leftover.is_orphaned());
        assert!(Leftover::parse(&temporary(LATEST, State::Partial)).is_some());
        assert!(Leftover::parse(&temporary("checkpoint-000003", State::Removed)).is_some());
        for name in [
            "checkpoint-000003",
            ".checkpoint-000003.partial",
            ".checkpoint-000003.partial-01234567-1",
            ".checkpoint-000003.partial-01234567-1-0123456789abcdeg",
            ".checkpoint-000003.partial-01234567-1-0123456789abcdef-",
            ".checkpoint-000003.partial-0123456-1-0123456789abcdef",
            ".checkpoint-000003.partial-01234567-x-0123456789abcdef",
            ".notes.partial-01234567-1-0123456789abcdef",
            ".checkpoint-3.partial-01234567-1-0123456789abcdef",
        ] {
            assert!(Leftover::parse(name).is_none(), "{name}");
        }
    }

    #[test]
    fn a_process_of_another_machine_counts_as_alive() {
        let gone = format!(
            ".checkpoint-000003.partial-{}-999999999-0123456789abcdef",
            host()
        );
        assert!(Leftover::parse(&gone).unwrap().is_orphaned());
        let elsewhere = ".checkpoint-000003.partial-00000000-999999999-0123456789abcdef";
        assert!(!Leftover::parse(elsewhere).unwrap().is_orphaned());
    }
}
