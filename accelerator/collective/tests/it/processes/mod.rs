//! Jobs of real processes: the test's own executable, started once for each rank with plain
//! `RANK` variables and no launcher.

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

use accelerator_collective::{
    DType, Error, GroupOptions, Launch, Partition, ProcessGroup, ReduceOp, ShardLayout,
};
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::ports::free_port;

/// What a rank that belongs to a job does. Without the variables of a job it does nothing.
#[test]
fn a_rank() {
    let Ok(call) = env::var(CALL) else {
        return;
    };
    // The harness has begun a line.
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
            // Only a rank that was stopped, or that a plan strikes, goes on.
            match act(&deed, group) {
                Some(group) => group,
                None => return,
            }
        }
    };
    report(&group, &call);
    drop(group);
    wait_for_the_end_of_the_pulse();
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
            // Lives until then.
            let _busy = group.activity().busy();
            strike(Signal::KILL);
        }
        "segv" => loop {
            // The standard library takes the first one, and gives itself up as a handler. Two that
            // come before any thread has time for them are one.
            strike(Signal::SEGV);
            thread::sleep(Duration::from_millis(10));
        },
        "stop" => {
            strike(Signal::STOP);
            // Another thread may take the signal; this one is stopped a little later.
            thread::sleep(Duration::from_millis(100));
            // When it runs again, what the others said is read by another thread than this one, which
            // could complete an operation first where its data lie in shared memory.
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
    // Another thread may take the signal, which ends this one a little later.
    thread::sleep(Duration::from_secs(60));
    None
}

/// Strikes when this rank is in one of its collectives, wherever it is by then.
fn strike_later(signal: Signal) {
    thread::spawn(move || {
        while CALLS.load(Ordering::Acquire) < 3 {
            std::hint::spin_loop();
        }
        // A part of the time that one takes, another one each time.
        thread::sleep(Duration::from_micros(
            u64::from(std::process::id() % 29) * 100,
        ));
        println!("deed\t{}", now());
        kill_process(getpid(), signal).unwrap();
    });
}

/// How many collectives this rank has begun of those that it calls until one fails.
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

/// No thread of a group that is gone stays behind.
fn wait_for_the_end_of_the_pulse() {
    let names = || {
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten();
        let names = threads
            .flatten()
            .filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
        names.collect::<Vec<String>>()
    };
    let until = Instant::now() + Duration::from_secs(10);
    while names().iter().any(|name| name.starts_with("pulse-")) {
        assert!(Instant::now() < until, "{:?}", names());
        thread::sleep(Duration::from_millis(1));
    }
}

/// What one rank did and saw.
#[derive(Debug)]
pub(crate) struct EndedRank {
    pub(crate) pid: u32,
    pub(crate) status: ExitStatus,
    /// When it did what it was told, in milliseconds.
    pub(crate) deed: Option<u64>,
    pub(crate) error: Option<Told>,
    /// When it knew, without calling anything, and what.
    pub(crate) failure: Option<(u64, String)>,
    pub(crate) output: String,
}

/// An error as a rank told it.
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

/// One job of three ranks, of which one does something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessJob<'a> {
    /// The collective that all call then.
    pub(crate) call: &'a str,
    pub(crate) victim: usize,
    pub(crate) deed: &'a str,
    /// What else the ranks find in their environment.
    pub(crate) variables: &'a [(&'a str, &'a str)],
}

impl ProcessJob<'_> {
    /// Runs it to its end. A rank that is stopped runs again when the others have ended.
    pub(crate) fn run(self) -> Vec<EndedRank> {
        let port = free_port();
        let mut ranks: Vec<Running> = (0..WORLD).map(|rank| self.start(rank, port)).collect();
        let victim = ranks.remove(self.victim);
        let mut ended: Vec<EndedRank> = ranks.into_iter().map(Running::finish).collect();
        let pid = Pid::from_raw(victim.child.id() as i32).unwrap();
        // It may have ended, and is waited for only now.
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
        // What the ranks say fits into the pipes.
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

/// Milliseconds on a clock that all processes of the host share.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap().as_millis() as u64
}

/// Every survivor must name the victim, where and in what it was missed, and why, in time.
/// `kind` is "lost", or another one; the causes are parts of the text.
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

/// A collective of many frames from each rank to each.
pub(crate) const LARGE: &str = "all_reduce sum f32 x 3000000";

/// All-reduces of a large buffer, until one fails.
pub(crate) const FOR_EVER: &str = "all_reduce mean f32 x 3000000";

/// The same by a cut.
pub(crate) const SCATTERS_FOR_EVER: &str = "reduce_scatter_buffer mean f32 x 3000000";

/// Lets ranks wait until they know of a failure by themselves, and call then.
pub(crate) const WATCHING: (&str, &str) = ("COLLECTIVE_TEST_WATCHING", "1");

const WORLD: usize = 3;
const CALL: &str = "COLLECTIVE_TEST_CALL";
const DEED: &str = "COLLECTIVE_TEST_DEED";
