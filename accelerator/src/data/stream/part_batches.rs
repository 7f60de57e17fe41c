use accelerator_plan::TailPolicy;
use serde::{Deserialize, Serialize};

use super::{PartReader, SampleStream, StreamPart, StreamPass, Streamed};
use crate::core::error::{Error, Kind, Result};
use crate::data::batch::{Batch, BatchInfo, StepShare};
use crate::data::epoch::{Ahead, read_ahead};
use crate::data::exchange_step::exchange_step;
use crate::data::source::DeferredBatch;

/// This rank's batches of a stream of which each rank reads a part of its own.
///
/// Parts may end at different places, so ranks tell each other in every step how many samples they
/// have and whether there are more: the epoch ends when no rank has any.
pub(super) struct PartBatches<O> {
    ahead: Ahead<OwnStep<O>>,
    /// The samples of all ranks at the start of the pass.
    before: u64,
    has_ended: bool,
    pass: StreamPass,
    step: u64,
}

/// A step of this rank's own part.
struct OwnStep<O> {
    /// The number of its samples used in this pass, those that were left out included.
    done: u64,
    has_more: bool,
    /// `None` if the part has nothing for a step: it is empty, or too short.
    batch: Option<OwnBatch<O>>,
}

struct OwnBatch<O> {
    len: usize,
    real: usize,
    share: StepShare,
    value: DeferredBatch<O>,
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
    pub(super) fn new<S: SampleStream>(streamed: Streamed<S, O>, pass: StreamPass) -> Self {
        let reader = OwnPart {
            done: 0,
            first: Vec::new(),
            pass: pass.clone(),
            reader: None,
            streamed,
        };
        Self {
            ahead: read_ahead(&pass.spec, pass.timeline.clone(), reader),
            before: pass.start.consumed,
            has_ended: false,
            step: pass.first_step(),
            pass,
        }
    }

    fn read(&mut self) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let own = match self.ahead.next() {
            Some(own) => own,
            // Its thread ends after an error only, behind which nothing is asked for.
            None => return Ok(None),
        };
        // Each rank makes its own before the ranks exchange the step.
        let seed = self.pass.seed_of_batch(self.step);
        let own = own.and_then(|own| own.resolved(seed));
        let is_uneven = self.pass.spec.is_uneven();
        let is_alone = is_uneven || self.pass.world_size() == 1;
        let words = match &own {
            Ok(own) if is_alone => vec![StepReport::of(own)],
            Err(error) if is_alone => return Err(error.clone()),
            _ => {
                let position = self.pass.position(self.step);
                let mine = own.as_ref().map(StepReport::of);
                let (group, caller) = (&self.pass.group, self.pass.caller);
                exchange_step(group, position, mine, "read its part of the stream", caller)?
            }
        };
        let own = own?;
        let stops_early = self.pass.spec.tail() == TailPolicy::Drop;
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
        let batch = match own.batch {
            Some(batch) if words.iter().all(|word| word.has_batch) => batch,
            _ => return Err(empty(&words)),
        };
        self.step += 1;
        let info = BatchInfo {
            consumed: self.before + words.iter().map(|word| word.done).sum::<u64>(),
            epoch: self.pass.epoch,
            indices: Vec::new(),
            is_last: !has_more,
            len: batch.len,
            real: batch.real,
            share: batch.share,
            step: self.step - 1,
            uneven: is_uneven,
        };
        Ok(Some(Batch::new(batch.value, info)))
    }
}

impl<O: Send + 'static> Iterator for PartBatches<O> {
    type Item = Result<Batch<DeferredBatch<O>>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        let batch = self.read();
        self.has_ended = match &batch {
            Ok(Some(batch)) => batch.is_last(),
            _ => true,
        };
        batch.transpose()
    }
}

impl<O> OwnStep<O> {
    /// Makes the batch.
    fn resolved(self, seed: Option<u64>) -> Result<Self> {
        let finish = |batch: OwnBatch<O>| -> Result<_> {
            let value = DeferredBatch::Ready(batch.value.resolve(seed)?);
            Ok(OwnBatch { value, ..batch })
        };
        let batch = self.batch.map(finish).transpose()?;
        Ok(Self { batch, ..self })
    }
}

impl StepReport {
    fn of<O>(own: &OwnStep<O>) -> Self {
        Self {
            done: own.done,
            has_batch: own.batch.is_some(),
            has_more: own.has_more,
            has_new: own.batch.as_ref().is_some_and(|batch| batch.real > 0),
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
    streamed: Streamed<S, O>,
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
        let tail = self.pass.spec.tail();
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
        let batching = &self.streamed.batching;
        let value = batching.batch(self.pass.epoch, items, &indices, &self.pass.device);
        Ok(OwnStep {
            done: self.done,
            has_more,
            batch: Some(OwnBatch {
                len,
                real,
                share,
                value,
            }),
        })
    }

    fn open(&mut self) -> Result<PartReader<S::Item>> {
        let (pass, size) = (&self.pass, self.size());
        let part = StreamPart::of(pass.epoch, pass.rank(), pass.world_size());
        let stream = &*self.streamed.stream;
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

impl<S: SampleStream, O: 'static> Iterator for OwnPart<S, O> {
    type Item = Result<OwnStep<O>>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.read())
    }
}
