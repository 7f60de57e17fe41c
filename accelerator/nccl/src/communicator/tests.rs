//! The states of a communicator, without a GPU.

#![expect(unsafe_code, reason = "there is no memory to be careful with")]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::Library;
use crate::api::fake::Fake;

/// A group that fails on demand, and records what it was told.
#[derive(Default)]
struct Group {
    failure: Mutex<Option<String>>,
    told: Mutex<Vec<String>>,
    asked: Mutex<usize>,
}

impl Group {
    fn fails(&self, text: &str) {
        *self.failure.lock() = Some(text.to_owned());
    }

    fn told(&self) -> Vec<String> {
        self.told.lock().clone()
    }
}

impl FailureDetector for Group {
    fn failure(&self) -> Option<String> {
        *self.asked.lock() += 1;
        self.failure.lock().clone()
    }

    fn failed(&self, text: &str) {
        self.told.lock().push(text.to_owned());
    }
}

struct Setting {
    fake: Arc<Fake>,
    group: Arc<Group>,
    gpu: Option<Gpu>,
    id: UniqueId,
}

impl Setting {
    fn new(fake: Fake) -> Self {
        let fake = fake.inner();
        let library = Library::with(fake.clone()).unwrap();
        let gpu = Gpu::open(&library, 0).unwrap();
        Self {
            group: Arc::default(),
            id: gpu.unique_id().unwrap(),
            gpu: Some(gpu),
            fake,
        }
    }

    fn connect_within(&self, deadline: Duration) -> Result<Communicator> {
        self.connect_for(deadline, LONG)
    }

    fn connect_for(&self, connecting: Duration, closing: Duration) -> Result<Communicator> {
        let gpu = self.gpu.as_ref().unwrap();
        let timeouts = CommTimeouts {
            connecting,
            closing,
        };
        Communicator::connect(gpu, &self.id, (1, 2), self.group.clone(), timeouts)
    }

    fn connect(&self) -> Communicator {
        self.connect_within(LONG).unwrap()
    }

    /// Returns the calls since connecting, and asserts that nothing is left, not even a thread.
    fn calls(mut self) -> Vec<String> {
        self.gpu = None;
        // A watching thread would hold a reference.
        assert_eq!(Arc::strong_count(&self.group), 1);
        self.fake.assert_clean();
        let calls = self.fake.calls();
        assert_eq!(calls[..2], ["retain 0", "connect 1 of 2 by 1"]);
        assert_eq!(calls.last().unwrap(), "release 0");
        calls[2..calls.len() - 1].to_vec()
    }
}

fn sum(communicator: &Communicator) -> Result<()> {
    // SAFETY: the fake touches no memory.
    unsafe { communicator.all_reduce(DevicePointer(64), 8, DType::F32, ReduceOp::Sum) }
}

/// A time longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

const TIMEOUTS: CommTimeouts = CommTimeouts {
    connecting: LONG,
    closing: LONG,
};

const CLOSED: [&str; 2] = ["finalize", "destroy"];

#[test]
fn a_communicator_that_takes_its_time_connects_and_closes() {
    let setting = Setting::new(Fake::new().with_polls(5));
    let communicator = setting.connect();
    assert!(setting.fake.looks() >= 5);
    assert!(communicator.is_done().unwrap());
    communicator.wait().unwrap();
    drop(communicator);
    assert!(setting.group.told().is_empty());
    assert_eq!(setting.calls(), CLOSED);
}

#[test]
fn ranks_that_do_not_come_are_an_error_within_the_deadline() {
    let setting = Setting::new(Fake::new().with_polls(usize::MAX));
    let began = Instant::now();
    let error = setting
        .connect_within(Duration::from_millis(50))
        .unwrap_err();
    assert!(began.elapsed() >= Duration::from_millis(50));
    assert!(error.is_timeout() && !error.is_aborted(), "{error}");
    let text = error.to_string();
    assert!(
        text.starts_with("not all of the 2 ranks came together within 0.05 s"),
        "{text}"
    );
    assert_eq!(setting.group.told(), [text]);
    assert_eq!(setting.calls(), ["abort"]);
}

#[test]
fn a_group_that_ends_ends_connecting() {
    let setting = Setting::new(Fake::new().with_polls(usize::MAX));
    let error = thread::scope(|scope| {
        let connecting = scope.spawn(|| setting.connect_within(LONG).unwrap_err());
        setting.fake.await_call("connect");
        setting.group.fails("rank 0 is gone: killed");
        connecting.join().unwrap()
    });
    assert!(error.is_aborted());
    assert_eq!(
        error.to_string(),
        "the NCCL communicator of rank 1 of 2 was aborted: rank 0 is gone: killed"
    );
    assert!(setting.group.told().is_empty(), "it knows");
    assert_eq!(setting.calls(), ["abort"]);
}

#[test]
fn what_nccl_says_while_connecting_is_told() {
    let setting = Setting::new(Fake::new().with_polls(usize::MAX));
    setting.fake.fail_nccl("Duplicate GPU detected");
    let error = setting.connect_within(LONG).unwrap_err();
    assert!(error.is_aborted());
    assert!(error.to_string().contains("Duplicate GPU detected"));
    assert!(std::error::Error::source(&error).is_some());
    assert_eq!(setting.group.told(), [error.to_string()]);
    assert_eq!(setting.calls(), ["abort"]);
}

#[test]
fn a_connection_that_cannot_begin_is_told_and_leaves_nothing() {
    let setting = Setting::new(Fake::new().failing("connect"));
    let error = setting.connect_within(LONG).unwrap_err();
    assert!(error.is_cuda(), "{error:?}");
    assert_eq!(setting.group.told().len(), 1);
    assert_eq!(setting.calls(), [""; 0]);
}

#[test]
fn a_rank_outside_the_world_is_refused() {
    let setting = Setting::new(Fake::new());
    let gpu = setting.gpu.as_ref().unwrap();
    for (rank, world_size) in [(2, 2), (0, 0), (0, usize::MAX)] {
        let (group, place) = (setting.group.clone(), (rank, world_size));
        let error = Communicator::connect(gpu, &setting.id, place, group, TIMEOUTS);
        assert!(error.unwrap_err().is_misuse());
    }
    assert_eq!(setting.fake.calls(), ["retain 0"]);
}

#[test]
fn operations_are_put_in_order_by_events() {
    let setting = Setting::new(Fake::new().with_polls(3));
    let communicator = setting.connect();
    // SAFETY: the fake touches no memory.
    let mean = unsafe { communicator.all_reduce(DevicePointer(9), 3, DType::BF16, ReduceOp::Mean) };
    mean.unwrap();
    sum(&communicator).unwrap();
    communicator.order_after().unwrap();
    communicator.wait().unwrap();
    drop(communicator);
    let calls = setting.calls();
    assert_eq!(
        calls,
        [
            "context: record",
            "stream waits",
            "mean of bf16, 3 at 9",
            "record",
            "context: record",
            "stream waits",
            "sum of f32, 8 at 64",
            "record",
            "context: waits",
            "finalize",
            "destroy"
        ]
    );
}

#[test]
fn with_an_older_driver_the_host_waits() {
    let setting = Setting::new(Fake::new().with_driver(12_040));
    let communicator = setting.connect();
    sum(&communicator).unwrap();
    communicator.order_after().unwrap();
    assert!(communicator.is_done().unwrap());
    drop(communicator);
    let calls = ["synchronize", "sum of f32, 8 at 64", "record"];
    assert_eq!(setting.calls(), [&calls[..], &CLOSED].concat());
}

#[test]
fn without_operations_nothing_waits() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect();
    communicator.order_after().unwrap();
    drop(communicator);
    assert_eq!(setting.calls(), CLOSED);
}

#[test]
fn a_group_that_ends_frees_what_waits_and_ends_every_call() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect();
    setting.fake.stick();
    sum(&communicator).unwrap();
    assert!(!communicator.is_done().unwrap());
    let error = thread::scope(|scope| {
        let waiting = scope.spawn(|| communicator.wait().unwrap_err());
        setting.group.fails("rank 0 is gone: killed by signal 9");
        waiting.join().unwrap()
    });
    let errors = [
        sum(&communicator).unwrap_err(),
        communicator.order_after().unwrap_err(),
        communicator.is_done().unwrap_err(),
        communicator.wait().unwrap_err(),
        error,
    ];
    for error in errors {
        assert!(error.is_aborted());
        assert!(
            error
                .to_string()
                .ends_with("rank 0 is gone: killed by signal 9")
        );
    }
    assert_eq!(setting.fake.count("abort"), 1);
    assert_eq!(setting.fake.count("sum"), 1, "nothing is enqueued any more");
    drop(communicator);
    assert!(setting.group.told().is_empty());
    let calls = setting.calls();
    assert_eq!(calls.last().unwrap(), "abort");
}

#[test]
fn what_nccl_says_while_an_operation_is_under_way_is_told_once() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect();
    setting.fake.stick();
    sum(&communicator).unwrap();
    setting.fake.fail_nccl("remote process exited");
    let error = communicator.wait().unwrap_err();
    assert!(error.is_aborted());
    assert!(
        error
            .to_string()
            .ends_with("was aborted: NCCL failed in an operation under way: remote process exited"),
        "{error}"
    );
    assert_eq!(
        communicator.wait().unwrap_err().to_string(),
        error.to_string()
    );
    assert_eq!(setting.fake.count("abort"), 1);
    drop(communicator);
    assert_eq!(setting.group.told(), [error.to_string()]);
    assert_eq!(setting.fake.count("abort"), 1);
    setting.calls();
}

#[test]
fn nccl_that_fails_while_it_enqueues_ends_the_communicator() {
    let setting = Setting::new(Fake::new().with_polls(2));
    let communicator = setting.connect();
    setting.fake.fail_nccl("unhandled system error");
    let error = sum(&communicator).unwrap_err();
    assert!(error.is_aborted() && error.to_string().contains("unhandled system error"));
    drop(communicator);
    assert_eq!(setting.group.told(), [error.to_string()]);
    assert_eq!(setting.fake.count("abort"), 1);
    setting.calls();
}

#[test]
fn a_call_that_fails_ends_the_communicator_and_is_told() {
    for call in [
        "context: record",
        "stream waits",
        "sum",
        "record",
        "query",
        "context: waits",
    ] {
        let setting = Setting::new(Fake::new());
        let communicator = setting.connect();
        setting.fake.fail(call);
        let work = || {
            sum(&communicator)?;
            communicator.order_after()?;
            communicator.wait()
        };
        let error = work().unwrap_err();
        assert!(error.is_aborted(), "{call}: {error}");
        assert!(error.to_string().contains(call), "{call}: {error}");
        assert!(communicator.is_done().unwrap_err().is_aborted());
        drop(communicator);
        assert_eq!(setting.group.told(), [error.to_string()], "{call}");
        assert_eq!(setting.fake.count("abort"), 1, "{call}");
        setting.calls();
    }
}

#[test]
fn a_group_whose_detection_panics_has_failed() {
    struct Broken;

    impl FailureDetector for Broken {
        fn failure(&self) -> Option<String> {
            panic!("on purpose");
        }

        fn failed(&self, _: &str) {
            panic!("on purpose");
        }
    }

    let setting = Setting::new(Fake::new());
    let gpu = setting.gpu.as_ref().unwrap();
    let connected = Communicator::connect(gpu, &setting.id, (1, 2), Arc::new(Broken), TIMEOUTS);
    let error = connected.unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("its failure detection panicked")
    );
    assert_eq!(setting.calls(), ["abort"]);
}

#[test]
fn a_drop_that_waits_for_peers_is_freed_by_the_group() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect_for(LONG, Duration::MAX).unwrap();
    setting.fake.stick();
    sum(&communicator).unwrap();
    thread::scope(|scope| {
        let dropped = scope.spawn(|| drop(communicator));
        setting.fake.await_call("finalize");
        setting.group.fails("rank 0 is gone");
        dropped.join().unwrap();
    });
    assert!(setting.group.told().is_empty(), "it knows");
    assert_eq!(setting.calls()[4..], ["finalize", "abort"]);
}

#[test]
fn peers_that_do_not_end_are_left_when_the_timeout_is_over() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect_for(LONG, Duration::ZERO).unwrap();
    setting.fake.stick();
    sum(&communicator).unwrap();
    drop(communicator);
    assert!(setting.group.told().is_empty(), "nothing has failed");
    assert_eq!(setting.calls()[4..], ["finalize", "abort"]);
}

#[test]
fn an_end_that_fails_is_an_abort() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect();
    setting.fake.fail("finalize");
    drop(communicator);
    assert_eq!(setting.calls(), ["finalize", "abort"]);
}

#[test]
fn nobody_is_asked_while_there_is_nothing_to_wait_for() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect();
    sum(&communicator).unwrap();
    communicator.wait().unwrap();
    let asked = || (*setting.group.asked.lock(), setting.fake.looks());
    let deadline = Instant::now() + LONG;
    let mut before = asked();
    loop {
        // The time is five times the interval between two checks.
        thread::sleep(Duration::from_millis(100));
        let after = asked();
        if after == before {
            break;
        }
        assert!(Instant::now() < deadline, "they are asked still");
        before = after;
    }
    // The group is checked again once there is work.
    setting.fake.stick();
    sum(&communicator).unwrap();
    setting.group.fails("rank 0 is gone");
    assert!(communicator.wait().unwrap_err().is_aborted());
    drop(communicator);
    setting.calls();
}

#[test]
fn memory_is_reduced_as_often_as_asked() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect();
    let mut memory = DeviceMemory::new(setting.gpu.as_ref().unwrap(), 12).unwrap();
    let mut reduce =
        |dtype, times| communicator.all_reduce_memory(&mut memory, dtype, ReduceOp::Sum, times);
    assert!(reduce(DType::F64, 1).unwrap_err().is_misuse());
    assert!(reduce(DType::I16, 1).unwrap_err().is_misuse());
    reduce(DType::F32, 2).unwrap();
    assert_eq!(setting.fake.count("sum of f32, 3"), 2);
    // The memory can be used after a failure.
    setting.fake.fail("sum");
    assert!(reduce(DType::F32, 2).unwrap_err().is_aborted());
    assert_eq!(setting.fake.count("sum of f32, 3"), 3);
    drop(memory);
    assert_eq!(setting.fake.memory().len(), 1);
}

#[test]
fn memory_of_another_gpu_is_refused() {
    let setting = Setting::new(Fake::new());
    let communicator = setting.connect();
    let other = Gpu::open(&Library::with(setting.fake.clone()).unwrap(), 1).unwrap();
    let mut memory = DeviceMemory::new(&other, 12).unwrap();
    let reduced = communicator.all_reduce_memory(&mut memory, DType::F32, ReduceOp::Sum, 1);
    let error = reduced.unwrap_err();
    assert!(error.is_misuse());
    assert_eq!(
        error.to_string(),
        "memory of GPU 0000:01:00.0 was given to a communicator of GPU 0000:00:00.0"
    );
    assert_eq!(setting.fake.count("sum"), 0);
}

#[test]
fn operations_of_several_threads_take_turns() {
    let setting = Setting::new(Fake::new().with_polls(2));
    let communicator = setting.connect();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    sum(&communicator).unwrap();
                    communicator.is_done().unwrap();
                }
            });
        }
    });
    communicator.wait().unwrap();
    drop(communicator);
    let calls = setting.calls();
    let (operations, closed) = calls.split_at(400);
    assert_eq!(closed, CLOSED);
    for operation in operations.chunks(4) {
        assert_eq!(
            operation,
            [
                "context: record",
                "stream waits",
                "sum of f32, 8 at 64",
                "record"
            ]
        );
    }
}
