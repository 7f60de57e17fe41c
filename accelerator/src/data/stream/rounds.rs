//! Streams that are read in rounds, and this rank's batches of a stream that every rank reads.

use accelerator_plan::{BatchKind, EpochPlan, TailPolicy};

use super::sample_stream::{PartReader, SampleStream, StreamPart};
use super::{StreamPass, Streamed};
use crate::core::error::Result;
use crate::data::batch::{Batch, BatchInfo, StepShare};
use crate::data::source::DeferredBatch;

/// Reads a whole stream in rounds: the samples that all ranks use in a step.
pub(super) struct StreamRounds<I> {
    /// The number of samples used before the next round.
    before: u64,
    /// The first samples of the stream, where the last round is filled up with them.
    first: Vec<I>,
    has_ended: bool,
    pass: StreamPass,
    reader: PartReader<I>,
    /// The step of the next round.
    step: u64,
}

/// The samples that all ranks use in one step.
pub(super) struct StreamRound<I> {
    pub(super) items: Vec<I>,
    division: EpochPlan,
    /// The division of the samples that show if there is a next round; `None` if it cannot be read.
    next: Option<EpochPlan>,
    /// The place in the stream of the first of the items that are not padding.
    offset: u64,
    padding: usize,
    step: u64,
}

impl<I: Clone> StreamRounds<I> {
    /// The rounds of a pass, which are read from the first time on that somebody asks for them.
    pub(super) fn opened<'a, S: SampleStream<Item = I>>(
        rounds: &'a mut Option<Self>,
        stream: &S,
        pass: &StreamPass,
    ) -> Result<&'a mut Self> {
        match rounds {
            Some(rounds) => Ok(rounds),
            None => Ok(rounds.insert(Self::open(stream, pass.clone())?)),
        }
    }

    fn open<S: SampleStream<Item = I>>(stream: &S, pass: StreamPass) -> Result<Self> {
        let part = StreamPart::whole(pass.epoch);
        let size = pass.plan.global_batch();
        let before = pass
            .start
            .consumed
            .saturating_add(pass.skip.saturating_mul(size));
        let first = match pass.spec.tail() {
            TailPolicy::Pad if before > 0 => {
                PartReader::open(stream, part, 0)?.take(size as usize)?
            }
            _ => Vec::new(),
        };
        Ok(Self {
            before,
            first,
            has_ended: false,
            reader: PartReader::open(stream, part, before)?,
            step: pass.first_step(),
            pass,
        })
    }

    pub(super) fn next(&mut self) -> Result<Option<StreamRound<I>>> {
        if self.has_ended {
            return Ok(None);
        }
        // Behind an error there is nothing.
        self.has_ended = true;
        let new = self.reader.take(self.size())?;
        if new.is_empty() {
            return Ok(None);
        }
        let is_full = new.len() == self.size();
        let next = match is_full {
            true => self.reader.peek(self.lookahead()),
            false => Some(0),
        };
        self.has_ended = next == Some(0);
        let pads = self.pass.spec.tail() == TailPolicy::Pad;
        let mut items = match pads && !is_full {
            true => self.first.clone(),
            false => Vec::new(),
        };
        if pads && is_full && self.first.is_empty() {
            self.first = new.clone();
        }
        let (offset, padding) = (self.before, items.len());
        self.before += new.len() as u64;
        self.step += 1;
        items.extend(new);
        Ok(Some(StreamRound {
            division: self.pass.divide(items.len(), padding)?,
            items,
            next: next.map(|next| self.pass.divide(next, 0)).transpose()?,
            offset,
            padding,
            step: self.step - 1,
        }))
    }

    /// Returns how many samples of the next round show if this rank has a batch in it.
    fn lookahead(&self) -> usize {
        match self.pass.spec.tail() {
            TailPolicy::Exact | TailPolicy::Pad => 1,
            TailPolicy::Drop => self.size(),
            // A round lies in memory.
            TailPolicy::Uneven => self.pass.plan.share(self.pass.rank()).start as usize + 1,
        }
    }

    /// The samples of a full round.
    fn size(&self) -> usize {
        // A round lies in memory.
        self.pass.plan.global_batch() as usize
    }
}

/// The batch of one rank in a round.
pub(super) struct RankBatch {
    pub(super) info: BatchInfo,
    /// The numbers of its samples among the items.
    chosen: Vec<usize>,
}

impl<I: Clone> StreamRound<I> {
    /// Returns the batch of a rank; `None` if it has nothing to do any more.
    pub(super) fn hand(&self, rank: usize, pass: &StreamPass) -> Option<RankBatch> {
        let planned = self.division.batch(rank, 0)?;
        let new = (self.items.len() - self.padding) as u64;
        let chosen: Vec<_> = planned.indices.iter().map(|&i| i as usize).collect();
        let place = |&index: &usize| match index.checked_sub(self.padding) {
            Some(new) => self.offset + new as u64,
            None => index as u64,
        };
        let info = BatchInfo {
            consumed: self.offset + new,
            epoch: pass.epoch,
            indices: chosen.iter().map(place).collect(),
            is_last: self.next.as_ref().is_some_and(|next| next.steps(rank) == 0),
            len: chosen.len(),
            real: planned.real,
            share: match planned.kind {
                BatchKind::Idle => StepShare::Idle,
                BatchKind::Real => StepShare::Used,
            },
            step: self.step,
            uneven: pass.spec.is_uneven(),
        };
        Some(RankBatch { info, chosen })
    }

    /// The items of a hand.
    pub(super) fn items(&self, hand: &RankBatch) -> Vec<I> {
        hand.chosen.iter().map(|&i| self.items[i].clone()).collect()
    }

    /// Returns [`items`](Self::items) by value, if they are needed for nothing else.
    pub(super) fn into_items(mut self, hand: &RankBatch) -> Vec<I> {
        let is_run = hand.chosen.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        match (hand.chosen.first(), hand.chosen.last()) {
            (Some(&first), Some(&last)) if is_run => self.items.drain(first..=last).collect(),
            _ => self.items(hand),
        }
    }
}

/// This rank's batches of a stream that every rank reads as a whole.
pub(super) struct InterleavedBatches<S: SampleStream, O> {
    pass: StreamPass,
    /// The rounds; `None` before the first batch.
    rounds: Option<StreamRounds<S::Item>>,
    streamed: Streamed<S, O>,
}

impl<S: SampleStream, O> InterleavedBatches<S, O> {
    pub(super) fn new(streamed: Streamed<S, O>, pass: StreamPass) -> Self {
        Self {
            pass,
            rounds: None,
            streamed,
        }
    }
}

impl<S: SampleStream, O: 'static> InterleavedBatches<S, O> {
    fn read(&mut self) -> Result<Option<Batch<DeferredBatch<O>>>> {
        let rounds = StreamRounds::opened(&mut self.rounds, &*self.streamed.stream, &self.pass)?;
        let Some(round) = rounds.next()? else {
            return Ok(None);
        };
        let pass = &self.pass;
        let Some(hand) = round.hand(pass.rank(), pass) else {
            return Ok(None);
        };
        let items = round.into_items(&hand);
        let indices = &hand.info.indices;
        let batching = &self.streamed.batching;
        let value = batching.batch(pass.epoch, items, indices, &pass.device);
        Ok(Some(Batch::new(value, hand.info)))
    }
}

impl<S: SampleStream, O: 'static> Iterator for InterleavedBatches<S, O> {
    type Item = Result<Batch<DeferredBatch<O>>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}
