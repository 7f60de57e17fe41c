//! Jobs of real processes: the test's own executable, started once per rank with plain `RANK` variables and no
//! launcher.

use std::{
    env,
    io::Read,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use accelerator_collective::internal::ShardLayout;
use accelerator_collective::{
    DType, Error, GroupOptions, Launch, Partition, ProcessGroup, ReduceOp,
};
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::ports::free_port;

/// Acts as a rank if the variables of a job are set, and otherwise does nothing.
#[test]
fn a_rank() {
    let Ok(call) = env::var(CALL) else {
        return;
    };
    // The test harness has begun a line.
    println!();
    let deed = env::var(DEED).ok();
    let group = connect();
    group.barrier().unwrap();
    group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum).unwrap();
    let group = match deed {
        None => group,
        Some(deed) => {
            if !deed.ends_with("in the middle") {
                println!("deed\t{}", now());
            }
            // Only a rank that was stopped, or that a plan strikes, continues.
            match act(&deed, group) {
                Some(group) => group,
                None => return,
            }
        }
    };
    report(&group, &call);
    drop(group);
    wait_for_the_end_of_the_heartbeats();
}

fn connect() -> ProcessGroup {
    let options = GroupOptions::new().with_connect_timeout(Duration::from_secs(60));
    ProcessGroup::connect(&Launch::from_env().unwrap(), &options).unwrap()
}

fn act(deed: &str, group: ProcessGroup) -> Option<ProcessGroup> {
    let strike = |signal| kill_process(getpid(), signal).unwrap();
    match deed {
        "kill" => strike(Signal::KILL),
        "kill while busy" => {
            // The guard lives until the kill.
            let _busy = group.activity().busy();
            strike(Signal::KILL);
        }
        "segv" => loop {
            // The standard library takes the first signal and then removes its handler. Two signals that arrive before
            // a thread handles them count as one.
            strike(Signal::SEGV);
            thread::sleep(Duration::from_millis(10));
        },
        "stop" => {
            strike(Signal::STOP);
            // Another thread may take the signal, and this one stops a little later.
            thread::sleep(Duration::from_millis(100));
            // When the rank runs again, another thread reads the messages of the others. This one could complete an
            // operation first if its data is in shared memory.
            let until = Instant::now() + Duration::from_secs(10);
            while group.failure().is_none() && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            return Some(group);
        }
        "exit" => std::process::exit(7),
        "panic" => panic!("a panic that the test wants"),
        "drop" => {
            drop(group);
            return None;
        }
        "abort" => {
            group.abort("its data set is empty");
            return None;
        }
        "kill in the middle" => strike_later(Signal::KILL),
        "stop in the middle" => strike_later(Signal::STOP),
        // A fault plan strikes within the collective.
        _ => return Some(group),
    }
    if deed.ends_with("in the middle") {
        return Some(group);
    }
    // Another thread may take the signal, and this one ends a little later.
    thread::sleep(Duration::from_secs(60));
    None
}

/// Strikes while this rank is anywhere in one of its collectives.
fn strike_later(signal: Signal) {
    thread::spawn(move || {
        while CALLS.load(Ordering::Acquire) < 3 {
            std::hint::spin_loop();
        }
        // The delay is a part of the time of a collective, and differs each time.
        thread::sleep(Duration::from_micros(
            u64::from(std::process::id() % 29) * 100,
        ));
        println!("deed\t{}", now());
        kill_process(getpid(), signal).unwrap();
    });
}

/// The number of collectives that this rank has begun in its loop.
static CALLS: AtomicUsize = AtomicUsize::new(0);

fn reduce_for_ever(group: &ProcessGroup) -> Result<(), Error> {
    let mut buffer = group.buffer(DType::F32, 3_000_000);
    loop {
        CALLS.fetch_add(1, Ordering::Release);
        group.all_reduce_buffer(&mut buffer, ReduceOp::Mean)?;
    }
}

fn scatter_for_ever(group: &ProcessGroup) -> Result<(), Error> {
    let mut buffer = group.buffer(DType::F32, 3_000_000);
    let partition = Partition::new(buffer.len(), group.world_size());
    let parts = (0..group.world_size()).map(|rank| vec![partition.range(rank)]);
    let cut = Arc::new(ShardLayout::new(buffer.len(), parts.collect())?);
    loop {
        CALLS.fetch_add(1, Ordering::Release);
        group.reduce_scatter_buffer(&mut buffer, ReduceOp::Mean, &cut)?;
    }
}

fn report(group: &ProcessGroup, call: &str) {
    if env::var(WATCHING.0).is_ok() {
        let failure = loop {
            match group.failure() {
                Some(failure) => break failure,
                None => thread::sleep(Duration::from_millis(1)),
            }
        };
        println!("failure\t{}\t{failure}", now());
    }
    let error = invoke(group, call).unwrap_err();
    let time = now();
    let again = group.barrier().unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
    let kind = match () {
        () if error.is_peer_left() => "left",
        () if error.is_peer_lost() => "lost",
        () if error.is_protocol() => "protocol",
        () => "other",
    };
    let culprit = error.culprit().unwrap();
    println!(
        "error\t{time}\t{kind}\t{}\t{}\t{}\t{}\t{error}",
        culprit.rank(),
        culprit.host(),
        culprit.pid().unwrap(),
        culprit.cause()
    );
}

fn invoke(group: &ProcessGroup, call: &str) -> Result<(), Error> {
    let mut values = vec![1.0_f32; 100_000];
    match call {
        "all_reduce" => group.all_reduce(&mut values, ReduceOp::Sum),
        LARGE => group.all_reduce(&mut vec![1.0_f32; 3_000_000], ReduceOp::Sum),
        "barrier" => group.barrier(),
        FOR_EVER => reduce_for_ever(group),
        SCATTERS_FOR_EVER => scatter_for_ever(group),
        "broadcast" => group.broadcast(&mut values, 0),
        _ => panic!("{call} is no call of this test"),
    }
}

/// Waits until no thread of the dropped group is left.
fn wait_for_the_end_of_the_heartbeats() {
    let names = || {
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten();
        let names = threads
            .flatten()
            .filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
        names.collect::<Vec<String>>()
    };
    let until = Instant::now() + Duration::from_secs(10);
    while names().iter().any(|name| name.starts_with("heartbeat-")) {
        assert!(Instant::now() < until, "{:?}", names());
        thread::sleep(Duration::from_millis(1));
    }
}

/// The record of one rank.
#[derive(Debug)]
pub(crate) struct EndedRank {
    pub(crate) pid: u32,
    pub(crate) status: ExitStatus,
    /// The time of its deed in milliseconds.
    pub(crate) deed: Option<u64>,
    pub(crate) error: Option<Told>,
    /// The time at which it knew of the failure without a call, and the failure.
    pub(crate) failure: Option<(u64, String)>,
    pub(crate) output: String,
}

/// An error that a rank reported.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) time: u64,
    pub(crate) kind: String,
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) cause: String,
    pub(crate) text: String,
}

/// A job of three ranks, of which one acts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessJob<'a> {
    /// The collective that all ranks call afterwards.
    pub(crate) call: &'a str,
    pub(crate) victim: usize,
    pub(crate) deed: &'a str,
    /// The other variables of the ranks.
    pub(crate) variables: &'a [(&'a str, &'a str)],
}

impl ProcessJob<'_> {
    /// Runs the job to its end. A stopped rank continues when the others have ended.
    pub(crate) fn run(self) -> Vec<EndedRank> {
        let port = free_port();
        let mut ranks: Vec<Running> = (0..WORLD).map(|rank| self.start(rank, port)).collect();
        let victim = ranks.remove(self.victim);
        let mut ended: Vec<EndedRank> = ranks.into_iter().map(Running::finish).collect();
        let pid = Pid::from_raw(victim.child.id() as i32).unwrap();
        // The process may have ended already, since it is reaped only now.
        let _ = kill_process(pid, Signal::CONT);
        ended.insert(self.victim, victim.finish());
        ended
    }

    fn start(&self, rank: usize, port: u16) -> Running {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args([
                "processes::a_rank",
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", WORLD.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("ACCEL_LIVENESS_TIMEOUT", "1")
            .env(CALL, self.call)
            .envs(self.variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if rank == self.victim {
            command.env(DEED, self.deed);
        }
        Running {
            child: command.spawn().unwrap(),
            until: Instant::now() + Duration::from_secs(60),
        }
    }
}

struct Running {
    child: Child,
    until: Instant,
}

impl Running {
    fn finish(mut self) -> EndedRank {
        // The output of the ranks fits into the pipes.
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < self.until, "a rank does not end");
            thread::sleep(Duration::from_millis(5));
        };
        let mut output = String::new();
        let (out, err) = (self.child.stdout.take(), self.child.stderr.take());
        out.unwrap().read_to_string(&mut output).unwrap();
        let deed = line(&output, "deed").map(|fields| fields[0].parse().unwrap());
        let error = line(&output, "error").map(|fields| Told {
            time: fields[0].parse().unwrap(),
            kind: fields[1].to_owned(),
            rank: fields[2].parse().unwrap(),
            host: fields[3].to_owned(),
            pid: fields[4].parse().unwrap(),
            cause: fields[5].to_owned(),
            text: fields[6].to_owned(),
        });
        let failure = line(&output, "failure");
        let failure = failure.map(|fields| (fields[0].parse().unwrap(), fields[1].to_owned()));
        err.unwrap().read_to_string(&mut output).unwrap();
        EndedRank {
            pid: self.child.id(),
            status,
            deed,
            error,
            failure,
            output,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn line<'a>(output: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let mut lines = output.lines().map(|line| line.split('\t'));
    let found = lines.find_map(|mut fields| (fields.next() == Some(name)).then_some(fields));
    found.map(Iterator::collect)
}

/// Returns milliseconds on a clock that all processes of the host share.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap().as_millis() as u64
}

/// Asserts that every survivor names the victim, the collective and the cause in time. `kind` is "lost" or another
/// kind, and the cause is a part of the text.
pub(crate) fn assert_named(
    job: ProcessJob<'_>,
    ranks: &[EndedRank],
    kind: &str,
    cause: &str,
    limit: u64,
) {
    let pid = ranks[job.victim].pid;
    let deed = ranks[job.victim].deed.unwrap();
    for (rank, survivor) in ranks.iter().enumerate() {
        if rank == job.victim {
            continue;
        }
        let output = &survivor.output;
        assert!(survivor.status.success(), "{job:?}, rank {rank}: {output}");
        let error = survivor.error.as_ref().unwrap();
        assert_eq!(error.kind, kind, "{job:?}: {error:?}");
        assert_eq!((error.rank, error.pid), (job.victim, pid), "{error:?}");
        assert!(error.cause.contains(cause), "{job:?}: {error:?}");
        let named = format!("rank {} (process {pid} on {})", job.victim, error.host);
        let number = match job.call {
            FOR_EVER | SCATTERS_FOR_EVER => "was in collective #",
            _ => "was in collective #2",
        };
        for part in [&named, cause, number, job.call, "mod.rs:"] {
            assert!(error.text.contains(part), "{part:?} in {job:?}: {error:?}");
        }
        let waited = error.time.saturating_sub(deed);
        assert!(waited <= limit, "{waited} ms, {job:?}: {error:?}");
    }
}

/// A collective of many frames between each two ranks.
pub(crate) const LARGE: &str = "all_reduce sum f32 x 3000000";

/// All-reduces of a large buffer until one fails.
pub(crate) const FOR_EVER: &str = "all_reduce mean f32 x 3000000";

/// Reduce-scatters of a large buffer until one fails.
pub(crate) const SCATTERS_FOR_EVER: &str = "reduce_scatter_buffer mean f32 x 3000000";

/// Makes ranks wait until they know of a failure without a call, and call then.
pub(crate) const WATCHING: (&str, &str) = ("COLLECTIVE_TEST_WATCHING", "1");

const WORLD: usize = 3;
const CALL: &str = "COLLECTIVE_TEST_CALL";
const DEED: &str = "COLLECTIVE_TEST_DEED";
