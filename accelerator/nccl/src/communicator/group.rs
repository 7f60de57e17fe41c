//! Ranks of a process group, which become NCCL's.

use std::sync::Arc;
use std::time::Duration;

use accelerator_collective::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::state::{CommTimeouts, GroupFailureDetector, Notify};
use super::{CLOSING, Communicator};
use crate::api::UniqueId;
use crate::error::{Error, Kind, Result};
use crate::gpu::Gpu;

impl Communicator {
    /// Connects this rank's GPU with those of all other ranks of the group, each of which calls this, and
    /// waits until all are there, for as long as `deadline` at most.
    ///
    /// All ranks get the same outcome. A failure of NCCL's does not end the group while they connect, since
    /// there may be another way. Afterwards it does, and an end of the group ends the communicator.
    ///
    /// Ranks compare [`GpuLocation`](crate::GpuLocation)s first: NCCL itself is late to notice that two share a GPU.
    ///
    /// # Errors
    /// The outer error is the group's, which failed meanwhile or had failed before. The inner one says which
    /// rank could not connect, and why: [`is_timeout`](Error::is_timeout) if not all ranks came within the
    /// deadline, [`is_misuse`](Error::is_misuse) if `NCCL_COMM_BLOCKING` asks for calls that no deadline
    /// ends, [`is_aborted`](Error::is_aborted) if NCCL failed while it connected; NCCL's error, or the driver's
    /// ([`is_cuda`](Error::is_cuda)), if a rank could not even begin. What was connected is aborted then.
    #[track_caller]
    pub fn connect_group(
        gpu: &Gpu,
        group: &ProcessGroup,
        deadline: Duration,
    ) -> Result<Result<Self>, accelerator_collective::Error> {
        let group = group.for_purpose("connect NCCL");
        let blocking = std::env::var("NCCL_COMM_BLOCKING").ok();
        let begun = begin(gpu, &group, blocking.as_deref()).map_err(Refusal::from);
        let begun = group.all_gather_object(&begun)?;
        let id = match all(begun).and_then(|ids| UniqueId::received(&ids[0])) {
            Ok(id) => id,
            Err(error) => return Ok(Err(error)),
        };
        let detector = Arc::new(GroupFailureDetector::new(&group));
        let place = (group.rank(), group.world_size());
        let timeouts = CommTimeouts {
            connecting: deadline,
            closing: CLOSING,
        };
        let connected = Self::connect(gpu, &id, place, detector.clone(), timeouts);
        let outcome = connected.as_ref().map(drop).map_err(Refusal::from);
        if let Err(error) = all(group.all_gather_object(&outcome)?) {
            if let Ok(communicator) = connected {
                // A peer that is not there does not end with it.
                let inner = &communicator.inner;
                inner.start_abort(error.clone(), Notify::Nobody);
            }
            return Ok(Err(error));
        }
        detector.enable();
        Ok(connected)
    }
}

/// The id of rank 0; nothing of others.
fn begin(gpu: &Gpu, group: &ProcessGroup, blocking: Option<&str>) -> Result<Vec<u8>> {
    if blocking.is_some_and(|value| value.trim().parse() == Ok(1)) {
        return Err(Error::misuse(
            "NCCL_COMM_BLOCKING is 1: calls of NCCL's would wait for ranks that are gone, beyond any \
                       deadline; unset it",
        ));
    }
    match group.rank() {
        0 => Ok(gpu.unique_id()?.to_bytes().to_vec()),
        _ => Ok(Vec::new()),
    }
}

/// A rank's account of its error, for the others.
#[derive(Debug, Deserialize, Serialize)]
struct Refusal {
    kind: Kind,
    text: String,
}

impl<E: std::borrow::Borrow<Error>> From<E> for Refusal {
    fn from(error: E) -> Self {
        let error = error.borrow();
        Self {
            kind: error.kind(),
            text: error.to_string(),
        }
    }
}

/// Returns what all ranks have, or else the error of one: of the first that did not just wait for others.
fn all<T>(outcomes: Vec<Result<T, Refusal>>) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(outcomes.len());
    let mut refused: Option<(usize, Refusal)> = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match (outcome, &refused) {
            (Ok(value), _) => values.push(value),
            (Err(refusal), None) => refused = Some((rank, refusal)),
            (Err(refusal), Some((_, known)))
                if known.kind == Kind::Timeout && refusal.kind != Kind::Timeout =>
            {
                refused = Some((rank, refusal));
            }
            (Err(_), Some(_)) => {}
        }
    }
    match refused {
        Some((rank, Refusal { kind, text })) => {
            let message = format!("NCCL of rank {rank} does not connect: {text}");
            Err(Error::new(kind, message))
        }
        None => Ok(values),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use accelerator_collective::{DType, GroupOptions, ReduceOp};

    use super::*;
    use crate::Library;
    use crate::api::fake::Fake;
    use crate::gpu::DeviceMemory;

    const LONG: Duration = Duration::from_secs(60);

    type Connected = Result<Communicator>;

    /// Connects two ranks, which are threads, each with a fake of its own.
    fn connect(fakes: [&Arc<Fake>; 2], deadline: Duration) -> [(ProcessGroup, Gpu, Connected); 2] {
        let groups = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
        let mut groups = groups.into_iter();
        thread::scope(|scope| {
            let ranks = fakes.map(|fake| {
                let group = groups.next().unwrap();
                scope.spawn(move || {
                    let library = Library::with(fake.clone()).unwrap();
                    let gpu = Gpu::open(&library, 0).unwrap();
                    let connected = Communicator::connect_group(&gpu, &group, deadline).unwrap();
                    (group, gpu, connected)
                })
            });
            ranks.map(|rank| rank.join().unwrap())
        })
    }

    fn whole(ranks: &[(ProcessGroup, Gpu, Connected); 2]) {
        thread::scope(|scope| {
            for (group, ..) in ranks {
                scope.spawn(|| group.barrier().unwrap());
            }
        });
    }

    #[test]
    fn all_ranks_connect_by_the_id_of_rank_0() {
        let fakes = [3, 4].map(|id| Fake::new().with_id(id).with_polls(3).inner());
        let ranks = connect(fakes.each_ref(), LONG);
        for (rank, (_, _, connected)) in ranks.iter().enumerate() {
            assert!(connected.is_ok());
            assert_eq!(fakes[rank].count(&format!("connect {rank} of 2 by 3")), 1);
        }
        whole(&ranks);
    }

    #[test]
    fn one_rank_that_cannot_is_told_to_all_and_ends_no_group() {
        let fakes = [Fake::new(), Fake::new().failing("connect")].map(Fake::inner);
        let ranks = connect(fakes.each_ref(), LONG);
        for (group, _, connected) in &ranks {
            let error = connected.as_ref().unwrap_err();
            assert!(error.is_cuda(), "{error:?}");
            let text = error.to_string();
            assert!(
                text.starts_with("NCCL of rank 1 does not connect: CUDA failed"),
                "{text}"
            );
            assert_eq!(group.failure(), None);
        }
        whole(&ranks);
        assert_eq!(
            (fakes[0].count("abort"), fakes[0].count("finalize")),
            (1, 0)
        );
    }

    #[test]
    fn a_rank_that_fails_is_named_and_not_one_that_waits_for_it() {
        let waiting = Fake::new().with_polls(usize::MAX);
        let fakes = [waiting, Fake::new().failing("connect")].map(Fake::inner);
        for (_, _, connected) in connect(fakes.each_ref(), Duration::from_millis(50)) {
            let error = connected.unwrap_err();
            assert!(error.is_cuda() && !error.is_timeout(), "{error:?}");
            assert!(error.to_string().starts_with("NCCL of rank 1"), "{error}");
        }
        let fakes = [(); 2].map(|()| Fake::new().with_polls(usize::MAX).inner());
        for (_, _, connected) in connect(fakes.each_ref(), Duration::from_millis(50)) {
            let error = connected.unwrap_err();
            assert!(error.is_timeout(), "{error:?}");
            assert!(error.to_string().starts_with("NCCL of rank 0"), "{error}");
        }
    }

    #[test]
    fn once_connected_a_failure_ends_the_group_and_what_others_wait_for() {
        let fakes = [Fake::new(), Fake::new()].map(Fake::inner);
        let [(first, gpu, waits), (_second, _, fails)] = connect(fakes.each_ref(), LONG);
        let (waits, fails) = (waits.unwrap(), fails.unwrap());
        fakes.iter().for_each(|fake| fake.stick());
        let mut memory = DeviceMemory::new(&gpu, 4).unwrap();
        let mut other = DeviceMemory::new(&fails.inner.gpu, 4).unwrap();
        thread::scope(|scope| {
            let waiting =
                scope.spawn(|| waits.all_reduce_memory(&mut memory, DType::F32, ReduceOp::Sum, 1));
            fakes[0].await_call("sum");
            fakes[1].fail_nccl("unhandled system error");
            let failed = fails.all_reduce_memory(&mut other, DType::F32, ReduceOp::Sum, 1);
            for error in [failed.unwrap_err(), waiting.join().unwrap().unwrap_err()] {
                assert!(error.is_aborted(), "{error:?}");
                let text = error.to_string();
                assert!(text.contains("unhandled system error"), "{text}");
            }
        });
        let failure = first.failure().unwrap();
        assert!(failure.contains("rank 1"), "{failure}");
    }

    #[test]
    fn a_group_of_one_that_ends_frees_what_waits() {
        let fake = Fake::new().inner();
        let library = Library::with(fake.clone()).unwrap();
        let gpu = Gpu::open(&library, 0).unwrap();
        let group = ProcessGroup::single();
        let connected = Communicator::connect_group(&gpu, &group, LONG).unwrap();
        let communicator = connected.unwrap();
        fake.stick();
        group.abort("its data set is empty");
        let mut memory = DeviceMemory::new(&gpu, 4).unwrap();
        let waited = communicator.all_reduce_memory(&mut memory, DType::F32, ReduceOp::Sum, 1);
        let text = waited.unwrap_err().to_string();
        assert!(text.contains("its data set is empty"), "{text}");
    }

    #[test]
    fn a_group_that_has_failed_is_the_outer_error() {
        let library = Library::with(Fake::new().inner()).unwrap();
        let gpu = Gpu::open(&library, 0).unwrap();
        let groups = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
        groups[1].abort("its data set is empty");
        let error = Communicator::connect_group(&gpu, &groups[0], LONG).unwrap_err();
        assert!(error.is_peer_lost(), "{error:?}");
    }

    #[test]
    fn blocking_calls_are_refused() {
        let library = Library::with(Fake::new().inner()).unwrap();
        let gpu = Gpu::open(&library, 0).unwrap();
        let group = ProcessGroup::single();
        for value in ["1", " 1 "] {
            let error = begin(&gpu, &group, Some(value)).unwrap_err();
            assert!(error.is_misuse());
            assert!(error.to_string().contains("NCCL_COMM_BLOCKING is 1"));
        }
        for value in [None, Some("0"), Some("")] {
            assert_eq!(begin(&gpu, &group, value).unwrap(), [1; UniqueId::SIZE]);
        }
    }
}
