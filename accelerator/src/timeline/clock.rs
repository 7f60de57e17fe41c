use std::time::Instant;

use accelerator_collective::ProcessGroup;
use accelerator_host::machine::{boot_id, unix_time};
use serde::{Deserialize, Serialize};

use crate::core::error::Result;

pub(super) const PURPOSE: &str = "the trace of all ranks";

/// The offset of this rank's clock from that of rank 0 at one moment, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct ClockSync {
    /// The moment, in this rank's time.
    pub(super) at: u64,
    /// The number to add to this rank's time to get rank 0's.
    pub(super) offset: i64,
    /// The largest error of the offset.
    pub(super) error: u64,
}

#[derive(Debug, Deserialize, Serialize)]
struct ClockReading {
    /// Differs between any two boots of any two machines.
    boot: String,
    /// Wall time minus this rank's time.
    wall: i64,
    error: u64,
    ends: Vec<u64>,
}

/// The number of times that the ranks exchange their times: the luckiest rounds decide.
const ROUNDS: usize = 16;

impl ClockSync {
    /// Compares the time since `anchor` with that of rank 0, which all ranks must do.
    ///
    /// In each round every rank sends its time to all others. What rank 0 has received was sent
    /// before, and what it sent was received after: that bounds the offset on both sides, as in NTP
    /// (RFC 5905), whose estimate is the middle. Ranks of one machine share a wall clock, which tells
    /// more exactly; it counts where it lies within these bounds.
    #[track_caller]
    pub(super) fn hold(group: &ProcessGroup, anchor: Instant) -> Result<Self> {
        let now = || anchor.elapsed().as_nanos() as u64;
        if group.world_size() == 1 {
            return Ok(Self {
                at: now(),
                ..Self::default()
            });
        }
        let rank = group.rank();
        let mut begins = Vec::with_capacity(ROUNDS);
        let mut ends = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            begins.push(group.all_gather(&[now()])?);
            ends.push(now());
        }
        let at = now();
        let (wall, error) = wall_minus(anchor);
        let all = group
            .for_purpose(PURPOSE)
            .all_gather_object(&ClockReading {
                boot: boot_id().unwrap_or_default(),
                wall,
                error,
                ends: ends.clone(),
            })?;
        let (mine, zero) = (&all[rank], &all[0]);
        let rounds = begins.iter().zip(&ends).zip(&zero.ends);
        let (least, most) = rounds.fold((i64::MIN, i64::MAX), |(least, most), bounds| {
            let ((begins, end), end_of_zero) = bounds;
            (
                least.max(difference(begins[0], *end)),
                most.min(difference(*end_of_zero, begins[rank])),
            )
        });
        let by_wall = mine.wall.saturating_sub(zero.wall);
        let meeting = if rank == 0 {
            Self {
                at,
                ..Self::default()
            }
        } else if mine.boot == zero.boot
            && !mine.boot.is_empty()
            && (least..=most).contains(&by_wall)
        {
            Self {
                at,
                offset: by_wall,
                error: mine.error + zero.error,
            }
        } else {
            let width = most.saturating_sub(least).unsigned_abs();
            Self {
                at,
                offset: least.midpoint(most),
                error: width.div_ceil(2),
            }
        };
        Ok(meeting)
    }

    /// A time of this rank as one of rank 0; between two meetings clocks are taken to drift evenly.
    pub(super) fn translate(meetings: &[Self], time: u64) -> i64 {
        let offset = match meetings {
            [] => 0,
            [first, .., last] if last.at > first.at => {
                let passed = time.clamp(first.at, last.at) - first.at;
                let part = passed as f64 / (last.at - first.at) as f64;
                first.offset + ((last.offset - first.offset) as f64 * part).round() as i64
            }
            [first, ..] => first.offset,
        };
        (time as i64).saturating_add(offset)
    }
}

/// `a - b`, of times that fit.
fn difference(a: u64, b: u64) -> i64 {
    (a as i64).saturating_sub(b as i64)
}

/// The wall time at the anchor, and how wrong that may be: the quickest of some readings.
fn wall_minus(anchor: Instant) -> (i64, u64) {
    let reading = |_| {
        let before = anchor.elapsed().as_nanos() as i64;
        let wall = unix_time().as_nanos() as i64;
        let after = anchor.elapsed().as_nanos() as i64;
        let error = (after - before).unsigned_abs().div_ceil(2);
        (wall - before.midpoint(after), error)
    };
    (0..8)
        .map(reading)
        .min_by_key(|(_, error)| *error)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ranks_find_how_far_their_clocks_are_apart() {
        let base = Instant::now();
        let found = crate::launch(3, |accelerator| {
            // Each rank's time began a second before that of the one below.
            let anchor = base - Duration::from_secs(accelerator.rank() as u64);
            let meeting = ClockSync::hold(accelerator.group(), anchor)?;
            Ok((accelerator.rank(), meeting))
        })
        .unwrap();
        for (rank, meeting) in found {
            // A rank whose time began a second earlier is a second ahead.
            let truth = -1_000_000_000 * rank as i64;
            assert!(
                (meeting.offset - truth).unsigned_abs() <= meeting.error,
                "{rank}: {meeting:?}"
            );
            assert!(meeting.error < 1_000_000_000, "{meeting:?}");
        }
    }

    #[test]
    fn between_two_meetings_clocks_drift_evenly() {
        let meeting = |at, offset| ClockSync {
            at,
            offset,
            error: 0,
        };
        let two = [meeting(1000, 10), meeting(2000, 30)];
        let times = [0, 1000, 1500, 2000, 9000].map(|time| ClockSync::translate(&two, time));
        assert_eq!(times, [10, 1010, 1520, 2030, 9030]);
        assert_eq!(ClockSync::translate(&two[..1], 5000), 5010);
        assert_eq!(ClockSync::translate(&[], 5000), 5000);
    }
}
