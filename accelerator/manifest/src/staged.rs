//! Hidden names that tell whose they are.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

use crate::hash::ContentHash;

/// The name of what is being written and shall have another name when it is whole:
/// `.model.safetensors.partial-<host>-<process>-<random>`.
///
/// Each writer has names of its own, so that two that write to one place do not write into one file, and
/// what a dead one has left is told from what is being written.
///
/// ```
/// use accelerator_manifest::StagedName;
///
/// let mine = StagedName::new("model.safetensors");
/// assert_ne!(mine, StagedName::new("model.safetensors"));
///
/// // Found in a folder, by this process or another one.
/// let found = StagedName::parse(&mine.to_string()).unwrap();
/// assert_eq!(found.target(), "model.safetensors");
/// assert!(!found.is_orphaned());
/// assert!(StagedName::parse(".model.safetensors.partial").is_none());
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StagedName {
    host: String,
    process: u32,
    random: String,
    state: State,
    target: String,
}

impl StagedName {
    /// One more name for this process to write what shall be called `target`.
    #[must_use]
    pub fn new(target: &str) -> Self {
        Self::in_state(target, State::Partial)
    }

    /// `None` where nothing is being written under such a name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::parse_any(name).filter(|staged| staged.state == State::Partial)
    }

    /// What it shall be called.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Whether its writer was a process of this machine that does not exist any more. What cannot
    /// be known counts as alive.
    #[must_use]
    pub fn is_orphaned(&self) -> bool {
        self.host == host() && is_gone(self.process)
    }

    pub(crate) fn in_state(target: &str, state: State) -> Self {
        Self {
            host: host().to_owned(),
            process: std::process::id(),
            random: format!("{:016x}", RandomState::new().build_hasher().finish()),
            state,
            target: target.to_owned(),
        }
    }

    pub(crate) fn parse_any(name: &str) -> Option<Self> {
        let (target, rest) = name.strip_prefix('.')?.rsplit_once('.')?;
        let (state, rest) = [State::Partial, State::Removed]
            .into_iter()
            .find_map(|x| Some((x, rest.strip_prefix(x.as_str())?.strip_prefix('-')?)))?;
        let mut parts = rest.split('-');
        let (host, process, random) = (parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str| text.bytes().all(|x| matches!(x, b'0'..=b'9' | b'a'..=b'f'));
        let is_ours = parts.next().is_none()
            && (host.len(), random.len()) == (8, 16)
            && is_hex(host)
            && is_hex(random);
        let process: u32 = process.parse().ok()?;
        is_ours.then(|| Self {
            host: host.to_owned(),
            process,
            random: random.to_owned(),
            state,
            target: target.to_owned(),
        })
    }
}

impl fmt::Display for StagedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            host,
            process,
            random,
            state,
            target,
        } = self;
        let state = state.as_str();
        write!(f, ".{target}.{state}-{host}-{process}-{random}")
    }
}

/// Why a thing has a hidden name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum State {
    /// It is being written.
    Partial,
    /// It is being removed.
    Removed,
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
    fn names_survive_the_folder_and_nothing_else_is_one() {
        for target in ["latest", "model.safetensors", "a.partial-b", ""] {
            let mine = StagedName::new(target);
            let found = StagedName::parse(&mine.to_string()).unwrap();
            assert_eq!(found, mine);
            assert!(!found.is_orphaned());
        }
        let removed = StagedName::in_state("x", State::Removed).to_string();
        assert!(StagedName::parse_any(&removed).is_some());
        assert!(StagedName::parse(&removed).is_none());
        for name in [
            "model.safetensors",
            ".model.safetensors.partial",
            ".x.partial-01234567-1",
            ".x.partial-01234567-1-0123456789abcdeg",
            ".x.partial-01234567-1-0123456789abcdef-",
            ".x.partial-0123456-1-0123456789abcdef",
            ".x.partial-01234567-x-0123456789abcdef",
            "x.partial-01234567-1-0123456789abcdef",
        ] {
            assert!(StagedName::parse_any(name).is_none(), "{name}");
        }
    }

    #[test]
    fn a_process_of_another_machine_counts_as_alive() {
        let gone = format!(".x.partial-{}-999999999-0123456789abcdef", host());
        assert!(StagedName::parse(&gone).unwrap().is_orphaned());
        let elsewhere = ".x.partial-00000000-999999999-0123456789abcdef";
        assert!(!StagedName::parse(elsewhere).unwrap().is_orphaned());
    }
}
