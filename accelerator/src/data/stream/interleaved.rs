use super::rounds::StreamRounds;
use super::{SampleStream, StreamPass, Streamed};
use crate::core::error::Result;
use crate::data::batch::Batch;
use crate::data::source::DeferredBatch;

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
