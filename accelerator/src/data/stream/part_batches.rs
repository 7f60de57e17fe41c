use core::iter;
use std::sync::Arc;

use accelerator_plan::TailPolicy;
use serde::{Deserialize, Serialize};

use super::{PartReader, SampleStream, StreamPart, StreamPass, Streamed, until_last};
use crate::core::error::{Error, Kind, Result};
use crate::data::batch::{Batch, BatchInfo, StepShare};
use crate::data::epoch::{Ahead, PrefetchedBatches};
use crate::data::source::DeferredBatch;

/// Returns this rank's batches of a stream of which each rank reads a part of its own.
///
/// Parts may end at different places, so ranks tell each other in every step how many samples they
/// have and whether there are more: the epoch ends when no rank has any.
pub(super) fn in_parts<S: SampleStream, O: Send + 'static>(
    streamed: Arc<Streamed<S, O>>,
    pass: StreamPass,
) -> PrefetchedBatches<O> {
    let mut own = OwnPart {
        done: 0,
        first: Vec::new(),
        pass: pass.clone(),
        reader: None,
        streamed,
    };
    let mut batches = PartBatches {
        ahead: pass.read_ahead(iter::repeat_with(move || own.read())),
        step: pass.first_step(),
        pass,
    };
    until_last(move || batches.read())
}

struct PartBatches<O> {
    ahead: Ahead<OwnStep<O>>,
    pass: StreamPass,
    step: u64,
}

/// A step of this rank's own part.
struct OwnStep<O> {
    /// The number of its samples used in this pass, those that were left out included.
    done: u64,
    has_more: bool,
    /// The batch, which does not know yet where it lies in the epoch; `None` if the part has nothing for a step: it is
    /// empty, or too short.
    batch: Option<Batch<DeferredBatch<O>>>,
}

/// The report of a rank on its step.
#[derive(Deserialize, Serialize)]
struct StepReport {
    done: u64,
    has_batch: bool,
    has_more: bool,
    /// Set if it has samples that were not used before.
    has_new: bool,
}

impl<O: Send + 'static> PartBatches<O> {
    fn read(&mut self) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let own = match self.ahead.next() {
            Some(own) => own,
            // Its thread ends after an error only, behind which nothing is asked for.
            None => return Ok(None),
        };
        // Each rank makes its own before the ranks exchange the step.
        let seed = self.pass.seed_of_batch(self.step);
        let own = own.and_then(|own| own.resolved(seed));
        let is_alone = self.pass.spec.is_uneven() || self.pass.world_size() == 1;
        let words = match &own {
            Ok(own) if is_alone => vec![StepReport::of(own)],
            Err(error) if is_alone => return Err(error.clone()),
            _ => {
                let mine = own.as_ref().map(StepReport::of);
                let action = "read its part of the stream";
                self.pass.exchange(self.step, mine, action)?
            }
        };
        let own = own?;
        let stops_early = self.pass.spec.tail == TailPolicy::Drop;
        let (has_batches, has_more) = match stops_early {
            true => (
                words.iter().all(|word| word.has_batch),
                words.iter().all(|word| word.has_more),
            ),
            false => (
                words.iter().any(|word| word.has_new),
                words.iter().any(|word| word.has_more),
            ),
        };
        if !has_batches {
            return Ok(None);
        }
        let mut batch = match own.batch {
            Some(batch) if words.iter().all(|word| word.has_batch) => batch,
            _ => return Err(empty(&words)),
        };
        let done: u64 = words.iter().map(|word| word.done).sum();
        batch.info.consumed = self.pass.start.consumed + done;
        batch.info.is_last = !has_more;
        batch.info.step = self.step;
        self.step += 1;
        Ok(Some(batch))
    }
}

impl<O> OwnStep<O> {
    fn resolved(self, seed: Option<u64>) -> Result<Self> {
        let batch = self.batch.map(|batch| batch.resolved(seed));
        let batch = batch.transpose()?;
        Ok(Self { batch, ..self })
    }
}

impl StepReport {
    fn of<O>(own: &OwnStep<O>) -> Self {
        Self {
            done: own.done,
            has_batch: own.batch.is_some(),
            has_more: own.has_more,
            has_new: own.batch.as_ref().is_some_and(|batch| batch.info.real > 0),
        }
    }
}

/// Some parts hold nothing from the beginning, and others do.
fn empty(words: &[StepReport]) -> Error {
    let ranks = words.iter().enumerate().filter(|(_, word)| !word.has_batch);
    let ranks: Vec<_> = ranks.map(|(rank, _)| rank.to_string()).collect();
    Error::new(
        Kind::Data,
        format!(
            "the parts of the stream that belong to ranks {} hold no sample from here on, and others do: \
             such a rank has no batch to run while it idles; divide the stream so that each part holds \
             one, or read it on rank 0 (`build_dispatched_stream`)",
            ranks.join(", ")
        ),
    )
}

/// Reads a part batch by batch, and continues with batches that do not count when it has ended.
struct OwnPart<S: SampleStream, O> {
    done: u64,
    /// The items that fill short batches, or that an idle rank runs.
    first: Vec<S::Item>,
    pass: StreamPass,
    /// The reader; `None` before the first batch.
    reader: Option<PartReader<S::Item>>,
    streamed: Arc<Streamed<S, O>>,
}

impl<S: SampleStream, O: 'static> OwnPart<S, O> {
    fn read(&mut self) -> Result<OwnStep<O>> {
        let size = self.size();
        let reader = match &mut self.reader {
            Some(reader) => reader,
            None => {
                let opened = self.open()?;
                self.reader.insert(opened)
            }
        };
        let items = reader.take(size)?;
        let tail = self.pass.spec.tail;
        let wanted = if tail == TailPolicy::Drop { size } else { 1 };
        // What cannot be read is more: its error comes in the next step.
        let has_more =
            items.len() == size && reader.peek(wanted).is_none_or(|found| found == wanted);
        let real = items.len();
        let start = self.place();
        let (items, share) = match tail {
            TailPolicy::Drop | TailPolicy::Uneven if real < wanted => (Vec::new(), StepShare::Used),
            TailPolicy::Pad => {
                if self.first.is_empty() {
                    self.first.clone_from(&items);
                }
                let padding = self.first.iter().cycle().cloned();
                let padding = padding.take(size - real).collect::<Vec<_>>();
                ([items, padding].concat(), StepShare::Used)
            }
            _ if real == 0 => (self.first.clone(), StepShare::Idle),
            _ => {
                if !has_more {
                    self.first.clone_from(&items);
                }
                (items, StepShare::Used)
            }
        };
        if items.is_empty() {
            return Ok(OwnStep {
                done: self.done,
                has_more: false,
                batch: None,
            });
        }
        self.done += real as u64;
        let (rank, count) = (self.pass.rank() as u64, self.pass.world_size() as u64);
        let len = items.len();
        let indices: Vec<_> = (start..start + len as u64)
            .map(|index| index * count + rank)
            .collect();
        let info = BatchInfo {
            consumed: 0,
            epoch: self.pass.epoch,
            indices: Vec::new(),
            is_last: false,
            len,
            real,
            share,
            step: 0,
            uneven: self.pass.spec.is_uneven(),
        };
        let (batching, device) = (&self.streamed.batching, &self.pass.context.device);
        let value = batching.batch(self.pass.epoch, items, &indices, device);
        Ok(OwnStep {
            done: self.done,
            has_more,
            batch: Some(Batch::new(value, info)),
        })
    }

    fn open(&mut self) -> Result<PartReader<S::Item>> {
        let (pass, size) = (&self.pass, self.size());
        let part = StreamPart::of(pass.epoch, pass.rank(), pass.world_size());
        let stream = &self.streamed.stream;
        let skipped = pass.start.step.saturating_mul(size as u64);
        if skipped > 0 {
            // A part that has ended by then still needs a batch to idle with.
            self.first = PartReader::open(stream, part, 0)?.take(size)?;
        }
        let mut reader = PartReader::open(stream, part, skipped)?;
        for _ in 0..pass.skip {
            let left_out = reader.take(size)?;
            if left_out.is_empty() {
                break;
            }
            self.done += left_out.len() as u64;
            if self.first.is_empty() {
                self.first = left_out;
            }
        }
        Ok(reader)
    }

    /// Returns the place of the next sample in the part.
    fn place(&self) -> u64 {
        self.pass.start.step.saturating_mul(self.size() as u64) + self.done
    }

    fn size(&self) -> usize {
        let share = self.pass.plan.share(self.pass.rank());
        (share.end - share.start) as usize
    }
}
