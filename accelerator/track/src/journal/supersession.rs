//! Which entries still count where a run went back to a checkpoint.

use std::collections::HashMap;

use super::line;
use crate::record::{Entry, Record};

/// Knows of each entry whether a resume superseded it.
///
/// Where the run resumed from a checkpoint at step `to`, what was logged before for greater steps does not count. What
/// is logged afterwards for an earlier step replaces what was logged for it before.
///
/// A rewind takes effect with the first entry that follows it. A program that dies before that has replaced nothing,
/// and its successor may resume from a later step.
#[derive(Debug, Default)]
pub(crate) struct Supersession {
    /// The rewinds that have taken effect: the number of the entry, and the step of the checkpoint.
    rewinds: Vec<(u64, Option<u64>)>,
    /// The last rewind, until an entry follows it.
    pending: Option<(u64, Option<u64>)>,
    /// The last entry that logged a step once more.
    relogged: HashMap<Slot, u64>,
}

impl Supersession {
    /// Takes notice of a line, and says whether it superseded earlier ones.
    pub(crate) fn note(&mut self, line: &[u8]) -> bool {
        let is_rewind = line::starts(line, "rewind");
        // Where a run never went back, which is the rule, lines need not be parsed.
        if !is_rewind && self.rewinds.is_empty() && self.pending.is_none() {
            return false;
        }
        let Some(entry) = line::parse(line) else {
            return false;
        };
        if let Record::Rewind { to } = entry.record {
            self.pending = Some((entry.n, to));
            return false;
        }
        let taken = self.pending.take_if(|_| is_logged(&entry.record));
        self.rewinds.extend(taken);
        let latest = self.rewinds.iter().filter_map(|&(_, to)| to).max();
        for slot in slots(&entry.record).filter(|slot| Some(slot.step) <= latest) {
            self.relogged.insert(slot, entry.n);
        }
        taken.is_some()
    }

    /// What of an entry still counts.
    pub(crate) fn filter(&self, mut entry: Entry) -> Option<Entry> {
        let at = self.rewinds.partition_point(|&(n, _)| n < entry.n);
        let later = &self.rewinds[at..];
        let Some(&(first, _)) = later.first() else {
            return Some(entry);
        };
        let counts = |slot: &Slot| {
            later.iter().all(|&(_, to)| Some(slot.step) <= to)
                && self.relogged.get(slot).is_none_or(|&n| n < first)
        };
        let still_counts = match &mut entry.record {
            Record::Metrics(metrics) => {
                let step = metrics.step;
                let points = &mut metrics.points;
                points.retain(|point| counts(&Slot::of_point(point.series, step)));
                !points.is_empty()
            }
            Record::Weights { step, .. } => later.iter().all(|&(_, to)| Some(*step) <= to),
            Record::Checkpoint { step, .. } => later.iter().all(|&(_, to)| *step <= to),
            record => slots(record).all(|slot| counts(&slot)),
        };
        still_counts.then_some(entry)
    }
}

/// Whether a record belongs to a step.
fn is_logged(record: &Record) -> bool {
    matches!(record, Record::Checkpoint { .. } | Record::Weights { .. })
        || slots(record).next().is_some()
}

/// What holds one value for each step.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Slot {
    of: SlotOf,
    step: u64,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum SlotOf {
    Series(u32),
    Media(&'static str, String),
}

impl Slot {
    fn of_point(series: u32, step: u64) -> Self {
        Self {
            of: SlotOf::Series(series),
            step,
        }
    }
}

/// The slots that a record fills.
fn slots(record: &Record) -> impl Iterator<Item = Slot> {
    let (points, step) = match record {
        Record::Metrics(metrics) => (metrics.points.as_slice(), metrics.step),
        _ => (&[][..], 0),
    };
    let media = match record {
        Record::Text { key, step, .. } => Some(("text", key, *step)),
        Record::Histogram { key, step, .. } => Some(("histogram", key, *step)),
        Record::Image { key, step, .. } => Some(("image", key, *step)),
        Record::Plot { key, step, .. } => Some(("plot", key, *step)),
        _ => None,
    };
    let media = media.map(|(kind, key, step)| Slot {
        of: SlotOf::Media(kind, key.clone()),
        step,
    });
    points
        .iter()
        .map(move |point| Slot::of_point(point.series, step))
        .chain(media)
}
