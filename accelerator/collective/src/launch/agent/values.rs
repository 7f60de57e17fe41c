//! The values that an engine tells: numbers of hosts and of processes, and an address.

use std::{fmt, str::FromStr};

use crate::{
    error::{Error, Result},
    launch::reader::invalid,
};

/// The number of hosts of a job: one number, or a range such as `1:4`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct NodeCount {
    /// The least; at least 1.
    pub least: usize,
    /// The most.
    pub most: usize,
}

impl NodeCount {
    pub(super) fn exactly(count: usize) -> Self {
        Self {
            least: count,
            most: count,
        }
    }
}

impl FromStr for NodeCount {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (least, most) = text.split_once(':').unwrap_or((text, text));
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|count| *count > 0);
        match (number(least), number(most)) {
            (Some(least), Some(most)) if least <= most => Ok(Self { least, most }),
            _ => Err(invalid(format!(
                "{text:?} is no number of hosts; expected a number from 1 on, or a range such as 1:4"
            ))),
        }
    }
}

impl fmt::Display for NodeCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.least == self.most {
            true => write!(f, "{}", self.most),
            false => write!(f, "{}:{}", self.least, self.most),
        }
    }
}

/// The number of processes that an agent starts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum AgentProcesses {
    /// This number; at least 1.
    Number(usize),
    /// One per device of the host (`auto` or `gpu`).
    Auto,
}

impl FromStr for AgentProcesses {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "auto" | "gpu" => Ok(Self::Auto),
            number => match number.parse() {
                Ok(count) if count > 0 => Ok(Self::Number(count)),
                _ => Err(invalid(format!(
                    "{text:?} is no number of processes; expected a number from 1 on, auto or gpu"
                ))),
            },
        }
    }
}

impl fmt::Display for AgentProcesses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(count) => write!(f, "{count}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// The address at which agents meet.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct AgentHead {
    /// The host of the first agent.
    pub host: String,
    /// The port on which it listens; `None` if the endpoint names no port.
    pub port: Option<u16>,
}

impl FromStr for AgentHead {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            invalid(format!(
                "{text:?} is no address of the first agent; expected a host, or a host and a port from 1 to \
                 65535 such as node-0:29400"
            ))
        };
        let (host, port) = match text.trim().strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or_else(wrong)?;
                (
                    host,
                    rest.strip_prefix(':').or((!rest.is_empty()).then_some("")),
                )
            }
            // An IPv6 address without brackets has several colons.
            None => match text.trim().split_once(':') {
                Some((host, port)) if !port.contains(':') => (host, Some(port)),
                _ => (text.trim(), None),
            },
        };
        let port = match port {
            Some(port) => Some(accelerator_host::port(port).ok_or_else(wrong)?),
            None => None,
        };
        match host.is_empty() {
            true => Err(wrong()),
            false => Ok(Self {
                host: host.to_owned(),
                port,
            }),
        }
    }
}

impl fmt::Display for AgentHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]", self.host)?,
            false => f.write_str(&self.host)?,
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}
