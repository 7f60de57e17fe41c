use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{SampleStream, SharedStream, Sharing, StreamPass, Streamed, part_batches, rounds};
use crate::data::LoaderBuilder;
use crate::data::builder::{Loader, SampleSource};
use crate::data::epoch::PrefetchedBatches;

impl<I: Send + 'static, O: Send + 'static> LoaderBuilder<I, O> {
    /// Builds a loader of a stream without a length. Every rank reads all of it and keeps its own samples, step by
    /// step, as it would from a data set in sequence. Ranks need not communicate, but each decodes everything (`W`
    /// ranks do `W` times the work of one), so use it for streams that are cheap to read.
    ///
    /// It must give the same samples in the same order on every rank, which cannot be checked. Tail policies do the same
    /// as for a data set. A resumed epoch continues after the samples that were used, at any world size.
    ///
    /// A batch is given out when it is known whether it [is the last](crate::data::Batch::is_last): when one sample
    /// more has been read, or it is clear that there is none. Under
    /// [`TailPolicy::Drop`](crate::plan::TailPolicy::Drop) it takes all samples of the next step, under
    /// [`TailPolicy::Uneven`](crate::plan::TailPolicy::Uneven) those up to this rank's first. A source that is
    /// slower than the training, such as a queue, holds each batch back for so long.
    ///
    /// An epoch that is left early does not wait for the reader: its thread ends when the source has given it
    /// the next sample. See [`SampleStream`] for one that can be entered in the middle.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use std::fs::File;
    /// use std::io::{BufRead, BufReader};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("lines.txt");
    /// # std::fs::write(&path, "a\nb\nc\nd\n")?;
    /// let batches = launch(2, |accelerator| {
    ///     let file = path.clone();
    ///     // In each epoch from its first line.
    ///     let lines = move |_part| match File::open(&file) {
    ///         Ok(file) => Box::new(BufReader::new(file).lines()) as Box<dyn Iterator<Item = _> + Send>,
    ///         Err(error) => Box::new(std::iter::once(Err(error))),
    ///     };
    ///     let loader = LoaderBuilder::from_fn(|lines: Vec<String>, _| lines.join(" "))
    ///         .batch_size(2)
    ///         .build_stream(lines);
    ///     let loader = accelerator.prepare(loader)?;
    ///     loader.epoch(0).map(|batch| Ok(batch?.into_inner())).collect::<Result<Vec<_>>>()
    /// })?;
    /// assert_eq!(batches, [["a b"], ["c d"]]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn build_stream(self, stream: impl SampleStream<Item = I>) -> Loader<O> {
        self.share(Sharing::Interleaved, stream, rounds::interleaved)
    }

    /// Builds a loader of a stream without a length, of which each rank reads only its own
    /// [`StreamPart`](crate::data::StreamPart), such as a share of the files. Nothing is read twice. In every step,
    /// ranks tell each other whether they have more.
    ///
    /// Parts may have different lengths; a rank whose part has ended idles until all have. Under
    /// [`TailPolicy::Pad`](crate::plan::TailPolicy::Pad) it gets its own first batch again, and under
    /// [`TailPolicy::Drop`](crate::plan::TailPolicy::Drop) the epoch ends with the first part that has no
    /// full batch. Under [`TailPolicy::Uneven`](crate::plan::TailPolicy::Uneven) each rank ends with its
    /// part, and ranks do not talk. In mid-epoch it resumes on as many ranks only.
    ///
    /// A batch is given out when one sample more of the part has been read
    /// ([`TailPolicy::Drop`](crate::plan::TailPolicy::Drop): the next batch), or it is clear that there is none;
    /// otherwise as [`build_stream`](Self::build_stream).
    ///
    /// ```
    /// use accelerator::data::StreamPart;
    /// use accelerator::prelude::*;
    ///
    /// let shares = launch(2, |accelerator| {
    ///     let files = [vec![0, 1, 2], vec![3, 4], vec![5, 6, 7]];
    ///     let numbers = move |part: StreamPart| {
    ///         let mine = files.clone().into_iter().skip(part.index()).step_by(part.count());
    ///         mine.flatten().map(std::io::Result::Ok)
    ///     };
    ///     let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///         .batch_size(4)
    ///         .build_sharded_stream(numbers);
    ///     let loader = accelerator.prepare(loader)?;
    ///     loader.epoch(0).map(|batch| batch.map(|batch| (batch.to_vec(), batch.real()))).collect()
    /// })?;
    /// assert_eq!(shares[0], [(vec![0, 1, 2, 5], 4), (vec![6, 7], 2)]);
    /// assert_eq!(shares[1], [(vec![3, 4], 2), (vec![3, 4], 0)]);
    /// # let _: &Vec<Vec<(Vec<u32>, usize)>> = &shares;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn build_sharded_stream(self, stream: impl SampleStream<Item = I>) -> Loader<O> {
        self.share(Sharing::Parts, stream, part_batches::in_parts)
    }

    /// Builds a loader of a stream without a length that only rank 0 reads, ahead of the training by as many steps as
    /// [`prefetch`](Self::prefetch) says. When all ranks ask for their next batch, rank 0 sends each of them its
    /// samples through serde, and each rank makes its batch of them. An error on one rank, in reading or in making
    /// its batch, is an error on every rank.
    ///
    /// Ranks must ask for batches in lockstep, as a training loop does, and not on another thread than their
    /// other collectives. [`TailPolicy::Uneven`](crate::plan::TailPolicy::Uneven) is refused by
    /// [`prepare`](crate::Accelerator::prepare). Otherwise, and in where it resumes, it is as
    /// [`build_stream`](Self::build_stream).
    ///
    /// ```
    /// use accelerator::prelude::*;
    ///
    /// let shares = launch(2, |accelerator| {
    ///     // In a program: lines of a file that only rank 0 has.
    ///     let lines = |_part| "a b c d e".split(' ').map(|word| std::io::Result::Ok(word.to_owned()));
    ///     let loader = LoaderBuilder::from_fn(|items: Vec<String>, _| items)
    ///         .batch_size(2)
    ///         .build_dispatched_stream(lines);
    ///     let loader = accelerator.prepare(loader)?;
    ///     loader.epoch(0).map(|batch| batch.map(|batch| (batch.concat(), batch.real()))).collect()
    /// })?;
    /// assert_eq!(shares[0], [("ab".to_owned(), 2), ("e".to_owned(), 1)]);
    /// // Rank 1 idles in the last step, on rank 0's samples.
    /// assert_eq!(shares[1], [("cd".to_owned(), 2), ("e".to_owned(), 0)]);
    /// # let _: &Vec<Vec<(String, usize)>> = &shares;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn build_dispatched_stream(self, stream: impl SampleStream<Item = I>) -> Loader<O>
    where
        I: Serialize + DeserializeOwned,
    {
        self.share(Sharing::Dispatched, stream, rounds::dispatched)
    }

    fn share<S: SampleStream<Item = I>>(
        self,
        sharing: Sharing,
        stream: S,
        feed: fn(Arc<Streamed<S, O>>, StreamPass) -> PrefetchedBatches<O>,
    ) -> Loader<O> {
        let spec = self.stream_spec();
        let streamed = Arc::new(Streamed {
            batching: self.batching.with_workers(spec.workers),
            stream,
        });
        Loader {
            origin: SampleSource::Stream(Arc::new(SharedStream {
                feed: Box::new(move |pass| feed(streamed.clone(), pass)),
                sharing,
            })),
            spec,
        }
    }
}
