//! Tests of NCCL itself, on one GPU.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]
#![expect(unsafe_code, reason = "operations on memory of the GPU")]

use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_collective::internal::{Rendezvous, StoreHost, StoreServer};
use accelerator_collective::{DType, GroupOptions, Launch, ProcessGroup, ReduceOp, Topology};
use accelerator_nccl::internal::DeviceMemory;
use accelerator_nccl::{Communicator, Gpu, GpuLocation, Library, Result, Version};
use bytemuck::Pod;
use half::{bf16, f16};
use serde::Serialize;
use serde::de::DeserializeOwned;

const LONG: Duration = Duration::from_secs(120);

/// The deadline of operations that may reach it.
const SHORT: Duration = Duration::from_secs(40);

fn gpu() -> (Library, Gpu) {
    let library = Library::load().unwrap();
    let gpu = Gpu::open(&library, 0).unwrap();
    (library, gpu)
}

fn alone(gpu: &Gpu) -> (Communicator, ProcessGroup) {
    let group = ProcessGroup::single();
    let connected = Communicator::connect_group(gpu, &group, LONG).unwrap();
    (connected.unwrap(), group)
}

/// Returns two ranks, of which the second only takes part in the group's side of connecting, not in NCCL's.
fn with_an_idle_peer() -> (ProcessGroup, ProcessGroup) {
    let groups = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
    let [first, second] = groups.try_into().unwrap();
    (first, second.for_purpose("connect NCCL"))
}

/// Agrees with the other rank, which sends the same type.
fn nod<T: Serialize + DeserializeOwned>(idle: &ProcessGroup, value: T) {
    // The answer of the other rank does not matter here.
    let _ = idle.all_gather_object(&Ok::<T, String>(value));
}

/// Returns the result of a reduction on a single rank, finished on the host or in the context.
fn reduced<T: Pod>(
    communicator: &Communicator,
    gpu: &Gpu,
    values: &[T],
    (dtype, op): (DType, ReduceOp),
    finish: fn(&Communicator) -> Result<()>,
) -> Vec<T> {
    let mut memory = DeviceMemory::new(gpu, size_of_val(values)).unwrap();
    memory.write(bytemuck::cast_slice(values)).unwrap();
    // SAFETY: the memory holds the values and lives until the communicator has waited.
    unsafe { communicator.all_reduce(memory.pointer(), values.len(), dtype, op) }.unwrap();
    finish(communicator).unwrap();
    let mut found = vec![T::zeroed(); values.len()];
    memory.read(bytemuck::cast_slice_mut(&mut found)).unwrap();
    communicator.wait().unwrap();
    found
}

fn check(communicator: &Communicator, gpu: &Gpu) {
    fn same<T: Pod + PartialEq + std::fmt::Debug>(
        communicator: &Communicator,
        gpu: &Gpu,
        dtype: DType,
        number: fn(u8) -> T,
    ) {
        assert_eq!(dtype.size(), size_of::<T>());
        for len in [1, 1000, 1 << 20] {
            let values: Vec<T> = (0..len).map(|index| number((index % 97) as u8)).collect();
            for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Mean] {
                for finish in [Communicator::wait, Communicator::order_after] {
                    let found = reduced(communicator, gpu, &values, (dtype, op), finish);
                    assert!(found == values, "{op} of {len} {dtype}");
                }
            }
        }
    }
    same(communicator, gpu, DType::F32, f32::from);
    same(communicator, gpu, DType::F64, f64::from);
    same(communicator, gpu, DType::F16, f16::from);
    same(communicator, gpu, DType::BF16, bf16::from);
    same(communicator, gpu, DType::I32, i32::from);
    same(communicator, gpu, DType::I64, i64::from);
    same(communicator, gpu, DType::I8, |number| number as i8);
    same(communicator, gpu, DType::U8, u8::from);
    same(communicator, gpu, DType::U32, u32::from);
    same(communicator, gpu, DType::U64, u64::from);
}

#[test]
fn where_there_is_no_driver_it_is_asked_for() {
    if std::path::Path::new("/proc/driver/nvidia").exists() {
        return;
    }
    let Err(error) = Library::load() else { return };
    assert!(error.is_absent(), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("libcuda.so.1")
            || text.contains("libnccl.so.2")
            || text.contains("nvidia-smi"),
        "{text}"
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_gpu_tells_where_it_is() {
    let (library, gpu) = gpu();
    assert!(is_from(library.version(), (2, 18)));
    assert!(is_from(gpu.driver_version(), (11, 4)));
    let location = GpuLocation::of(&gpu, &ProcessGroup::single());
    let parts: Vec<_> = location.bus_id().split([':', '.']).collect();
    assert_eq!(parts.len(), 4, "{}", location.bus_id());
    assert!(Gpu::open(&library, 1000).unwrap_err().is_misuse());
    println!(
        "NCCL {}, CUDA {}, {}",
        library.version(),
        gpu.driver_version(),
        location.bus_id()
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn one_rank_keeps_its_values_in_every_type() {
    let (_, gpu) = gpu();
    for _ in 0..2 {
        let (communicator, group) = alone(&gpu);
        check(&communicator, &gpu);
        drop(communicator);
        assert_eq!(group.failure(), None);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn many_operations_are_put_in_order() {
    let (_, gpu) = gpu();
    let (communicator, _) = alone(&gpu);
    let mut memory = DeviceMemory::new(&gpu, 4 << 20).unwrap();
    for round in 0..200_u32 {
        let values = vec![round as f32; 1 << 20];
        memory.write(bytemuck::cast_slice(&values)).unwrap();
        // SAFETY: the memory holds the values, and its next use comes after `order_after`.
        unsafe { communicator.all_reduce(memory.pointer(), 1 << 20, DType::F32, ReduceOp::Sum) }
            .unwrap();
        communicator.order_after().unwrap();
        let mut found = vec![0.0_f32; 1 << 20];
        memory.read(bytemuck::cast_slice_mut(&mut found)).unwrap();
        assert!(found == values, "in round {round}");
    }
    communicator.wait().unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_peer_that_never_comes_is_an_error_within_the_deadline() {
    let (_, gpu) = gpu();
    let (group, idle) = with_an_idle_peer();
    let began = Instant::now();
    let deadline = Duration::from_secs(3);
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            nod(&idle, Vec::<u8>::new());
            nod(&idle, ());
        });
        let connected = Communicator::connect_group(&gpu, &group, deadline).unwrap();
        connected.unwrap_err()
    });
    let took = began.elapsed();
    assert!(error.is_timeout(), "{error}");
    assert!(
        error
            .to_string()
            .contains("not all of the 2 ranks came together within 3 s")
    );
    assert!(took >= deadline && took < 5 * deadline, "{took:?}");
    assert_eq!(group.failure(), None);
    // The GPU still works.
    let (communicator, _) = alone(&gpu);
    check(&communicator, &gpu);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_group_that_ends_frees_who_connects() {
    let (_, gpu) = gpu();
    let (group, idle) = with_an_idle_peer();
    let began = Instant::now();
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            nod(&idle, Vec::<u8>::new());
            thread::sleep(Duration::from_millis(300));
            idle.abort("its data set is empty");
        });
        Communicator::connect_group(&gpu, &group, LONG).unwrap_err()
    });
    assert!(error.is_peer_lost(), "{error:?}");
    assert!(began.elapsed() < LONG / 4);
    let (communicator, _) = alone(&gpu);
    check(&communicator, &gpu);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_aborted_communicator_returns_the_reason_and_the_gpu_continues() {
    let (_, gpu) = gpu();
    let (communicator, group) = alone(&gpu);
    let memory = DeviceMemory::new(&gpu, 1 << 26).unwrap();
    group.abort("its data set is empty");
    let began = Instant::now();
    // The group is checked while there is work.
    let error = loop {
        assert!(began.elapsed() < LONG);
        // SAFETY: the memory holds as many elements and lives until the communicator is dropped.
        let reduced = unsafe {
            communicator.all_reduce(memory.pointer(), 1 << 24, DType::F32, ReduceOp::Sum)
        };
        if let Err(error) = reduced.and_then(|()| communicator.is_done().map(drop)) {
            break error;
        }
    };
    assert!(
        error.is_aborted() && error.to_string().contains("its data set is empty"),
        "{error}"
    );
    assert!(communicator.wait().unwrap_err().is_aborted());
    drop(communicator);
    drop(memory);
    let (communicator, _) = alone(&gpu);
    check(&communicator, &gpu);
}

/// Runs two ranks as processes, since an operation waits for everything in its context. Rank 0 uses the first GPU. Rank
/// 1, which runs the same test, uses the second, or the first if there is only one.
fn two(test: &str, rank: impl Fn(Result<Communicator>, &Gpu, &ProcessGroup)) {
    let library = Library::load().unwrap();
    let run = |number: usize, port: u16| {
        let gpu = Gpu::open(&library, number % library.gpu_count().unwrap()).unwrap();
        let store = Rendezvous::new("127.0.0.1", port).with_store(StoreHost::Launcher);
        let launch = Launch::new(Topology::new(number, 2).unwrap(), store);
        let group = ProcessGroup::connect(&launch, &GroupOptions::new()).unwrap();
        let connected = Communicator::connect_group(&gpu, &group, SHORT).unwrap();
        rank(connected, &gpu, &group);
        group.close().unwrap();
    };
    if let Ok(port) = std::env::var(PORT) {
        return run(1, port.parse().unwrap());
    }
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let port = store.local_addr().port();
    let second = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--include-ignored", "--nocapture"])
        .env(PORT, port.to_string())
        .spawn();
    let mut second = Second(second.unwrap());
    run(0, port);
    assert!(second.0.wait().unwrap().success());
}

/// The process of rank 1, which ends even if the test fails.
struct Second(Child);

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The variable that tells rank 1 where the ranks meet.
const PORT: &str = "ACCEL_NCCL_TEST_PORT";

/// Returns true if a version is this one or a later one.
fn is_from(version: Version, (major, minor): (u32, u32)) -> bool {
    (version.major(), version.minor()) >= (major, minor)
}

/// Returns true if two ranks can run here, and prints a line if they cannot.
fn is_place_for_two(library: &Library) -> bool {
    let is_shared = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
    let can_share = is_shared && is_from(library.version(), (2, 30));
    let enough = can_share || library.gpu_count().unwrap() > 1;
    if !enough {
        println!(
            "skipped: one GPU, which NCCL {} gives to one rank",
            library.version()
        );
    }
    enough
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_ranks_add_up() {
    if !is_place_for_two(&gpu().0) {
        return;
    }
    two("two_ranks_add_up", |communicator, gpu, group| {
        let communicator = communicator.unwrap();
        let places = group
            .all_gather_object(&GpuLocation::of(gpu, group))
            .unwrap();
        assert_eq!(GpuLocation::nccl_unavailable(&places), None);
        let own = 1.0 + group.rank() as f32;
        for (op, expected) in [
            (ReduceOp::Sum, 3.0),
            (ReduceOp::Mean, 1.5),
            (ReduceOp::Max, 2.0),
        ] {
            for len in [1, 1000, 1 << 22] {
                let values = vec![own; len];
                for finish in [Communicator::wait, Communicator::order_after] {
                    let sums = reduced(&communicator, gpu, &values, (DType::F32, op), finish);
                    assert!(sums.iter().all(|sum| *sum == expected), "{op} of {len}");
                }
            }
        }
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_rank_that_waits_on_its_gpu_for_one_that_is_gone_is_freed() {
    if !is_place_for_two(&gpu().0) {
        return;
    }
    let test = "a_rank_that_waits_on_its_gpu_for_one_that_is_gone_is_freed";
    two(test, |communicator, gpu, group| {
        let communicator = communicator.unwrap();
        let values = vec![1.0_f32; 1 << 20];
        let what = (DType::F32, ReduceOp::Sum);
        // The first operation makes the connections.
        reduced(&communicator, gpu, &values, what, Communicator::wait);
        if group.rank() == 1 {
            // Rank 1 makes no more calls until the group has ended.
            let began = Instant::now();
            while group.failure().is_none() {
                assert!(began.elapsed() < SHORT);
                thread::sleep(Duration::from_millis(5));
            }
            return;
        }
        let memory = DeviceMemory::new(gpu, 4 << 20).unwrap();
        // SAFETY: the memory holds as many elements and lives until the communicator is dropped.
        unsafe { communicator.all_reduce(memory.pointer(), 1 << 20, DType::F32, ReduceOp::Sum) }
            .unwrap();
        // No other rank calls it, so the kernel waits.
        thread::sleep(Duration::from_millis(200));
        assert!(!communicator.is_done().unwrap());
        group.abort("its data set is empty");
        let failed = Instant::now();
        let error = communicator.wait().unwrap_err();
        assert!(
            error.is_aborted() && error.to_string().contains("its data set is empty"),
            "{error}"
        );
        println!("freed after {:?}", failed.elapsed());
        assert!(failed.elapsed() < SHORT);
        drop(communicator);
        // The GPU still works.
        let (communicator, _) = alone(gpu);
        check(&communicator, gpu);
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_ranks_on_one_gpu_are_refused_by_nccl_and_end() {
    let (library, _) = gpu();
    if library.gpu_count().unwrap() > 1 || is_place_for_two(&library) {
        println!("skipped: two ranks can be here");
        return;
    }
    let test = "two_ranks_on_one_gpu_are_refused_by_nccl_and_end";
    two(test, |communicator, gpu, group| {
        let error = communicator.unwrap_err();
        println!("{error}");
        assert!(error.is_aborted(), "{error:?}");
        // The locations of the GPUs show the conflict in advance, and it does not end the group.
        let places = group
            .all_gather_object(&GpuLocation::of(gpu, group))
            .unwrap();
        let nccl_unavailable = GpuLocation::nccl_unavailable(&places).unwrap();
        assert!(
            nccl_unavailable.starts_with("ranks 0 and 1 share"),
            "{nccl_unavailable}"
        );
    });
}
