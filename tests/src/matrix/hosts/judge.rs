//! Judges whether every process of a job saw what it should.

use std::time::{Duration, Instant};

use super::{HostFault, Job, LAYOUT};
use crate::matrix::rank::Seen;

impl Job {
    /// Returns the seconds of the slowest process, if all is as it should be.
    pub(super) fn judge(
        &self,
        operation: &str,
        fault: HostFault,
        struck: Instant,
    ) -> Result<f64, String> {
        let times = match (fault.is_survived(), fault.host()) {
            (true, _) => self.judge_survived(),
            (false, 0) => self.judge_loss_of_head(fault),
            (false, _) => self.judge_loss(operation, fault),
        }?;
        let slowest = times.into_iter().max().unwrap_or(struck);
        let began = match operation {
            "idle" => self.latest_call().map_or(struck, |call| call.max(struck)),
            _ => struck,
        };
        let took = slowest.saturating_duration_since(began);
        match took <= fault.deadline() {
            true => Ok(took.as_secs_f64()),
            false => Err(format!("{took:.2?}, later than {:?}", fault.deadline())),
        }
    }

    /// Expects every rank to have continued, and the job to have succeeded.
    fn judge_survived(&self) -> Result<Vec<Instant>, String> {
        self.expect_codes(&[Some(0); LAYOUT.len()])?;
        let ranks = 0..LAYOUT.iter().sum();
        let times = ranks.map(|rank| {
            let (at, seen) = self.seen_by(rank)?;
            match seen.error {
                None => Ok(at),
                Some(error) => Err(format!("rank {rank}: {}", error.text)),
            }
        });
        times.collect()
    }

    /// Expects the ranks of the other hosts and all launchers to name the host, or one of its ranks.
    fn judge_loss(&self, operation: &str, fault: HostFault) -> Result<Vec<Instant>, String> {
        let host = fault.host();
        let own = match fault {
            HostFault::Cut(_) => Some(75),
            _ => None,
        };
        let codes: Vec<_> = (0..LAYOUT.len())
            .map(|other| if other == host { own } else { Some(75) })
            .collect();
        self.expect_codes(&codes)?;
        let first: usize = LAYOUT[..host].iter().sum();
        let lost = first..first + LAYOUT[host];
        let last = lost.end - 1;
        let text = format!(
            "host {host} (host{}, 10.77.0.{}, ranks {first} and {last}) was lost at ",
            host + 1,
            host + 1
        );
        let mut times = Vec::new();
        for other in (0..LAYOUT.len()).filter(|other| *other != host) {
            times.push(self.said_by(other, &text)?);
        }
        if own.is_some() {
            times.push(self.said_by(host, "host 0 (host1, 10.77.0.1")?);
        }
        for rank in (0..LAYOUT.iter().sum()).filter(|rank| !lost.contains(rank)) {
            let (at, seen) = self.seen_by(rank)?;
            times.push(at);
            let in_group = !matches!(operation, "rendezvous" | "connect");
            let error = seen.blames(lost.clone(), fault.words(), in_group)?;
            if !in_group {
                continue;
            }
            let culprit = error.culprit.as_ref();
            let is_named = culprit.is_some_and(|culprit| {
                lost.contains(&culprit.rank) && culprit.host == format!("host{}", host + 1)
            });
            if !is_named {
                return Err(format!("rank {rank}: culprit {culprit:?}: {}", error.text));
            }
            if seen.transport.as_deref() != Some("hierarchical") {
                return Err(format!("rank {rank}: not over hosts: {:?}", seen.transport));
            }
        }
        Ok(times)
    }

    /// Expects the launchers of the other hosts to name host 0; their ranks are killed at once. Host 0, if it still
    /// runs, names the hosts that it cannot reach.
    fn judge_loss_of_head(&self, fault: HostFault) -> Result<Vec<Instant>, String> {
        let is_there = matches!(fault, HostFault::Cut(_));
        let codes: Vec<_> = (0..LAYOUT.len())
            .map(|host| (host != 0 || is_there).then_some(75))
            .collect();
        self.expect_codes(&codes)?;
        let others = (1..LAYOUT.len()).map(|host| self.said_by(host, "host 0 (host1, 10.77.0.1"));
        let own = is_there.then(|| self.said_by(0, ") was lost at "));
        others.chain(own).collect()
    }

    /// Returns what a rank saw, and the time at which it was shown.
    fn seen_by(&self, rank: usize) -> Result<(Instant, Seen), String> {
        for line in &self.seen {
            let Some(text) = line.text.strip_prefix("SEEN ") else {
                continue;
            };
            let seen: Seen = serde_json::from_str(text).map_err(|error| error.to_string())?;
            if seen.rank == rank {
                return Ok((line.at, seen));
            }
        }
        Err(format!("rank {rank} said nothing"))
    }

    /// Returns the time of the last call of the operation that a rank reports.
    fn latest_call(&self) -> Option<Instant> {
        let seen = (0..LAYOUT.iter().sum()).filter_map(|rank| self.seen_by(rank).ok());
        let calls =
            seen.filter_map(|(at, seen)| at.checked_sub(Duration::from_secs_f64(seen.seconds)));
        calls.max()
    }

    /// Returns the time at which the launcher of a host printed `text`.
    fn said_by(&self, host: usize, text: &str) -> Result<Instant, String> {
        let mut lines = self.seen.iter().filter(|line| line.host == host);
        let line = lines.find(|line| line.text.contains(text));
        line.map(|line| line.at)
            .ok_or_else(|| format!("the launcher of host {host} does not say: {text}"))
    }

    /// Compares the exit codes of the launchers; those that are killed have none.
    fn expect_codes(&self, codes: &[Option<i32>]) -> Result<(), String> {
        let found = self
            .ended
            .iter()
            .map(|ended| ended.and_then(|ended| ended.code()));
        match found.eq(codes.iter().copied()) {
            true => Ok(()),
            false => Err(format!("expected codes {codes:?}, found {:?}", self.ended)),
        }
    }
}
