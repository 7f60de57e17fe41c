//! The names of the ways in which ranks are connected.

use std::{fmt, str::FromStr};

use crate::error::{Error, Kind, Result};

/// The way in which the ranks of a group are connected.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum TransportKind {
    /// The best that serves all ranks.
    #[default]
    Auto,
    /// Shared memory between the processes of each host, TCP connections between hosts.
    ///
    /// An all-reduce combines the values of each host in rank order, then those of the hosts in
    /// their order, so that a host sends no more than one rank would. Other operations, and means
    /// of integers, go by connections. The ranks of a host must follow one another.
    Hierarchical,
    /// Memory that the processes of one host share.
    Shm,
    /// TCP connections between processes.
    Tcp,
    /// Memory of the one process whose threads the ranks are.
    Threads,
}

impl TransportKind {
    const ALL: [Self; 5] = [
        Self::Auto,
        Self::Hierarchical,
        Self::Shm,
        Self::Tcp,
        Self::Threads,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Hierarchical => "hierarchical",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Threads => "threads",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransportKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| {
                Error::new(
                    Kind::Misuse,
                    format!(
                        "{text:?} is no transport; expected {}",
                        accelerator_host::TRANSPORT.grammar
                    ),
                )
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_has_the_names_of_all_transports() {
        let names = TransportKind::ALL.map(TransportKind::name);
        assert_eq!(accelerator_host::TRANSPORT.words(), names);
    }
}
