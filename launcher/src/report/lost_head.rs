//! The report of a host that has lost host 0.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::time::SystemTime;

use signal_hook::consts::signal;

use super::{FailureRecord, FirstFailure, FirstText, OtherRank, command_line, parts, words};
use crate::error::START_AGAIN;
use crate::process::End;
use crate::text::utc;

/// What a host other than host 0 knows of a job whose host 0 was lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostHead<'a> {
    /// The name of host 0.
    pub(crate) host: &'a str,
    /// How it was lost.
    pub(crate) loss: &'a str,
    /// The number of ranks of the job; 0 where none had been started.
    pub(crate) world_size: usize,
    /// The name of the job.
    pub(crate) job: &'a str,
    /// How often it had been restarted.
    pub(crate) restarts: u64,
    /// The ranks of this host.
    pub(crate) ranks: &'a [KnownRank],
}

/// A rank of this host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownRank {
    /// Its number among all ranks.
    pub(crate) rank: usize,
    /// Its process.
    pub(crate) pid: i32,
    /// How it ended, if it did before host 0 was lost.
    pub(crate) end: Option<End>,
}

impl FailureRecord {
    /// Describes the loss of host 0, as the launcher of another host sees it.
    pub(crate) fn of_lost_head(lost: &LostHead<'_>, command: &[OsString]) -> Self {
        let others = lost.ranks.iter().map(|known| {
            let (exit_code, signal) = parts(known.end.or(Some(End::Signal(signal::SIGKILL))));
            OtherRank {
                rank: known.rank,
                pid: known.pid,
                exit_code,
                signal,
                is_lost: false,
                by_itself: known.end.is_some(),
                last_words: Vec::new(),
                names_first: false,
            }
        });
        Self {
            collateral: others.collect(),
            first: FirstFailure {
                rank: 0,
                host: lost.host.to_owned(),
                node: 0,
                pid: 0,
                cause: lost.loss.to_owned(),
                exit_code: None,
                signal: None,
                signal_name: None,
                last_words: Vec::new(),
                log: None,
                reported_by: BTreeSet::new(),
                shown: FirstText {
                    end_text: format!("was {}", End::Lost),
                    report: None,
                    host: Some(lost.host.to_owned()),
                    loss: Some(lost.loss.to_owned()),
                },
            },
            exit_code: START_AGAIN,
            restarts: lost.restarts,
            world_size: lost.world_size,
            job: lost.job.to_owned(),
            command_line: command_line(&words(command)),
            command: words(command),
            log_files: Vec::new(),
            time: utc(SystemTime::now()),
        }
    }
}
