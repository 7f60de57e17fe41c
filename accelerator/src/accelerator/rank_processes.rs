use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use accelerator_collective::internal::{StoreOptions, StoreServer};
use accelerator_collective::{Culprit, ProcessGroup};
use accelerator_host::PREEMPTED_EXIT_CODE;
use accelerator_host::sync::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Accelerator, AcceleratorBuilder};
use crate::core::error::{Error, Kind, Result, panic_text};

/// The time that ranks have to end by themselves after one has failed: they name the failure meanwhile.
pub(crate) const GRACE: Duration = Duration::from_secs(10);
/// The job of ranks that [`launch_processes`] has started, by which they know it.
const JOB: &str = "launch_processes";

/// Runs `body` on `world_size` ranks, each a process, and waits until they have ended. For each rank, this program is
/// started again with the same arguments; when it reaches this call, it runs `body` and exits.
///
/// This is how a program trains on several processes without [`accel-launch`](crate#how-a-program-is-started), as
/// Accelerate's `notebook_launcher` does. What stands before the call runs on each rank, too; what stands behind it runs
/// once, in the process that the user has started. Ranks write to its standard output and error. They end when it
/// ends, however that is.
///
/// If `accel-launch`, torchrun, `mpirun`, `srun` or a cluster has started the program as one of several ranks, it
/// starts nothing, and runs `body` as that rank, whatever `world_size` says. A step of one task (`srun -n1`) starts
/// ranks.
///
/// Settings go through [`Accelerator::builder`], whose
/// [`launch_processes`](AcceleratorBuilder::launch_processes) is the same.
///
/// ```no_run
/// use accelerator::prelude::*;
///
/// fn main() -> Result<()> {
///     accelerator::launch_processes(2, |accelerator| {
///         let ranks = accelerator.gather_object(&std::process::id())?;
///         accelerator.print(format_args!("{ranks:?}"));
///         Ok(())
///     })
/// }
/// ```
///
/// # Errors
///
/// [`Error::is_config`] for 0 ranks; [`Error::is_io`] if the program cannot be started again;
/// [`Error::is_other`] with the rank that failed, and not one that failed because it lost that rank, or if `body` ended since
/// ranks were [preempted](Accelerator::preempted). Each rank prints its own error.
pub fn launch_processes(
    world_size: usize,
    body: impl FnOnce(Accelerator) -> Result<()>,
) -> Result<()> {
    Accelerator::builder().launch_processes(world_size, body)
}

impl AcceleratorBuilder {
    /// See [`launch_processes`].
    ///
    /// # Errors
    ///
    /// See [`launch_processes`].
    pub fn launch_processes(
        self,
        world_size: usize,
        body: impl FnOnce(Accelerator) -> Result<()>,
    ) -> Result<()> {
        match ProcessRole::of(JOB)? {
            ProcessRole::Placed => return self.build()?.run(body),
            ProcessRole::Started => {}
            ProcessRole::Parent => return RankProcesses::start(world_size, JOB)?.wait(),
        }
        // Nothing is sent. Without a thread, ranks notice by their heartbeats that it is gone.
        let _ = receive_from_parent(|()| {});
        let ended = self.build().and_then(|accelerator| {
            let trigger = accelerator.shared.reduction.trigger.clone();
            accelerator.run(body)?;
            Ok(trigger.has_told_of_preemption())
        });
        std::process::exit(match ended {
            Ok(false) => 0,
            Ok(true) => PREEMPTED_EXIT_CODE.into(),
            Err(error) => {
                if let Some(culprit) = error.culprit() {
                    // Without it, this rank may be named in place of the other.
                    let _ = send_to_parent(&culprit.rank());
                }
                eprintln!("Error: {error:?}");
                1
            }
        });
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ProcessRole {
    /// The one that starts them.
    Parent,
    /// A rank of another launcher.
    Placed,
    /// A rank that such a call has started.
    Started,
}

impl ProcessRole {
    /// Returns the role of this process in a call whose ranks have that job.
    ///
    /// # Errors
    ///
    /// If this process was started as a rank, and cannot read for which call.
    pub(crate) fn of(job: &str) -> Result<Self> {
        let is_rank = accelerator_host::variable("RANK").is_some();
        let is_ours = accelerator_host::variable(accelerator_host::JOB.name)
            .is_some_and(|theirs| theirs == job);
        Ok(match is_rank {
            _ if is_one_of_several() => Self::Placed,
            true if is_ours && is_started_for(job)? => Self::Started,
            // A rank of such a call has started this program, which has ranks of its own.
            true if is_ours => Self::Parent,
            true => Self::Placed,
            false => Self::Parent,
        })
    }
}

/// Returns whether a call has started this process itself, and not a rank of the call, whose variables this process
/// has, too.
#[cfg(target_os = "linux")]
fn is_started_for(job: &str) -> Result<bool> {
    let started_for =
        accelerator_collective::internal::inherited(accelerator_host::STARTED_BY.name)?;
    Ok(started_for.is_some_and(|started_for| started_for == job.as_bytes()))
}

#[cfg(not(target_os = "linux"))]
fn is_started_for(_job: &str) -> Result<bool> {
    Ok(true)
}

fn is_one_of_several() -> bool {
    let read = |name: &str| {
        let value = accelerator_host::variable(name)?;
        Some(value.to_string_lossy().into_owned())
    };
    accelerator_collective::internal::check_alone(read).is_err()
}

/// Ranks that run, each a process of this program. They end when this is dropped.
pub(crate) struct RankProcesses {
    ranks: Vec<RankProcess>,
    _store: StoreServer,
}

struct RankProcess {
    child: Child,
    /// The link to its standard input, which closes when this process ends.
    link: UnixStream,
}

impl RankProcesses {
    /// Starts this program again for each rank.
    pub(crate) fn start(world_size: usize, job: &str) -> Result<Self> {
        if world_size == 0 {
            return Err(Error::config(
                "0 ranks were asked for; at least 1 is needed",
            ));
        }
        let program = std::env::current_exe()?;
        let store = StoreServer::bind_with(
            ("127.0.0.1", 0),
            StoreOptions::new(world_size).with_job(job),
        )?;
        let port = store.local_addr().port();
        let mut started = Self {
            ranks: Vec::with_capacity(world_size),
            _store: store,
        };
        for rank in 0..world_size {
            let process = start(&program, rank, world_size, port, job)?;
            started.ranks.push(process);
        }
        Ok(started)
    }

    pub(crate) fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// The connection to a rank, by which it [receives](receive_from_parent) and [answers](send_to_parent).
    pub(crate) fn link(&self, rank: usize) -> &UnixStream {
        &self.ranks[rank].link
    }

    pub(crate) fn failure(&mut self, rank: usize) -> Error {
        let closed = Instant::now();
        let child = &mut self.ranks[rank].child;
        let status = loop {
            match child.try_wait() {
                // It is about to end.
                Ok(None) if closed.elapsed() < GRACE => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(status) => break status,
                Err(_) => break None,
            }
        };
        match status {
            Some(status) => failed(rank, self.world_size(), status),
            None => Error::new(
                Kind::Other,
                format!("rank {rank} of {} closed its connection", self.world_size()),
            ),
        }
    }

    pub(crate) fn wait(mut self) -> Result<()> {
        let mut failures: BTreeMap<usize, ExitStatus> = BTreeMap::new();
        let mut first_seen = None;
        loop {
            let mut running = 0;
            for (rank, process) in self.ranks.iter_mut().enumerate() {
                match process.child.try_wait()? {
                    None => running += 1,
                    Some(status) if !status.success() => {
                        failures.insert(rank, status);
                        first_seen.get_or_insert_with(Instant::now);
                    }
                    Some(_) => {}
                }
            }
            if running == 0 || first_seen.is_some_and(|at| at.elapsed() > GRACE) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let cause = failures
            .into_iter()
            .min_by_key(|(rank, _)| self.blames_another(*rank));
        match cause {
            None => Ok(()),
            Some((rank, status)) => Err(failed(rank, self.world_size(), status)),
        }
    }

    /// Returns `true` if the rank has ended because another one did.
    fn blames_another(&self, rank: usize) -> bool {
        let link = self.link(rank);
        // A process that the rank has started may keep the link open.
        if link.set_nonblocking(true).is_err() {
            return false;
        }
        ciborium::from_reader(link).is_ok_and(|culprit: usize| culprit != rank)
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        for RankProcess { child, .. } in &mut self.ranks {
            // One that has ended is no error.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn failed(rank: usize, world_size: usize, status: ExitStatus) -> Error {
    let message = match status.code() == Some(PREEMPTED_EXIT_CODE.into()) {
        true => "the ranks were preempted: start the program again".to_owned(),
        false => format!("rank {rank} of {world_size} failed: {status}"),
    };
    Error::new(Kind::Other, message)
}

/// Starts this program again as a rank. Its standard input is a connection to this process.
fn start(
    program: &Path,
    rank: usize,
    world_size: usize,
    port: u16,
    job: &str,
) -> Result<RankProcess> {
    let (rank, world_size, port) = (rank.to_string(), world_size.to_string(), port.to_string());
    let place = [
        ("RANK", &*rank),
        ("LOCAL_RANK", &*rank),
        ("WORLD_SIZE", &*world_size),
        ("LOCAL_WORLD_SIZE", &*world_size),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &*port),
        (accelerator_host::PORT.name, &*port),
        (accelerator_host::STORE.name, "launcher"),
        (accelerator_host::JOB.name, job),
    ];
    let (link, input) = UnixStream::pair()?;
    let mut command = Command::new(program);
    command
        .args(std::env::args_os().skip(1))
        .envs(place)
        // They are processes of one user on one host, whom the store lets in without a token.
        .env_remove(accelerator_host::TOKEN_FILE.name)
        .stdin(OwnedFd::from(input));
    accelerator_host::prepare_child(&mut command);
    let child = spawn_for(job, command);
    let child = child.map_err(|error| Error::io("start a rank of", program, error))?;
    Ok(RankProcess { child, link })
}

#[cfg(target_os = "linux")]
fn spawn_for(job: &str, command: Command) -> std::io::Result<Child> {
    let variable = accelerator_host::STARTED_BY.name;
    accelerator_collective::internal::spawn_with_inherited(command, variable, job.as_bytes())
}

#[cfg(not(target_os = "linux"))]
fn spawn_for(_job: &str, mut command: Command) -> std::io::Result<Child> {
    command.spawn()
}

/// Takes, on a thread, what the process sends that has started this rank, and ends this rank when that is gone.
pub(crate) fn receive_from_parent<T: DeserializeOwned>(
    mut take: impl FnMut(T) + Send + 'static,
) -> Result<()> {
    let receive = move || {
        let mut input = std::io::stdin().lock();
        while let Ok(value) = ciborium::from_reader(&mut input) {
            take(value);
        }
        std::process::exit(1);
    };
    std::thread::Builder::new()
        .name("parent".to_owned())
        .spawn(receive)?;
    Ok(())
}

pub(crate) fn send_to_parent(value: &impl Serialize) -> Result<()> {
    let link = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    send(&link, value)
}

pub(crate) fn send(mut link: &UnixStream, value: &impl Serialize) -> Result<()> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes).map_err(Error::other)?;
    Ok(link.write_all(&bytes)?)
}

/// Runs `body` on `world_size` ranks, each a thread of this process, and returns what they
/// return, in rank order.
///
/// This is how a notebook or a unit test runs a training function on several ranks. Settings go
/// through [`Accelerator::builder`], whose `launch` is the same.
///
/// Burn's CPU random generator is one for the whole process, so what ranks draw from it at the
/// same time is not reproducible. Build models with [`Accelerator::init`], which builds one at a time;
/// for reproducible dropout, use processes.
///
/// ```
/// let ranks = accelerator::launch(3, |accelerator| {
///     let all = accelerator.gather_object(&accelerator.rank())?;
///     assert_eq!(all, [0, 1, 2]);
///     Ok(accelerator.rank())
/// })?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), accelerator::Error>(())
/// ```
///
/// # Errors
///
/// The error or panic of the rank that failed first; the others are ended by it.
pub fn launch<T, F>(world_size: usize, body: F) -> Result<Vec<T>>
where
    T: Send,
    F: Fn(Accelerator) -> Result<T> + Send + Sync,
{
    Accelerator::builder().launch(world_size, body)
}

/// Runs `body` with each group on a thread of its own.
pub(crate) fn run<T, F>(groups: Vec<ProcessGroup>, body: F) -> Result<Vec<T>>
where
    T: Send,
    F: Fn(ProcessGroup) -> Result<T> + Send + Sync,
{
    // In the order in which ranks ended.
    let failures = Mutex::new(Vec::new());
    let results: Vec<Option<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let (body, failures) = (&body, &failures);
                let rank = group.rank();
                let (member, aborted) = (group.clone(), group.clone());
                let work = move || {
                    let outcome = catch_unwind(AssertUnwindSafe(|| body(group)));
                    let panicked = outcome.is_err();
                    let error = match outcome {
                        Ok(Ok(value)) => return Some(value),
                        Ok(Err(error)) => error,
                        Err(panic) => Error::new(
                            Kind::Panic,
                            format!("rank {rank} panicked: {}", panic_text(&*panic)),
                        ),
                    };
                    // Recorded before this rank leaves the group, so that it precedes the failures that it causes.
                    let reason = format!("it returned an error: {error:?}");
                    failures.lock().push((rank, error));
                    // A group that failed before keeps its cause.
                    match panicked {
                        true => aborted.abort_by_panic(),
                        false => aborted.abort(reason),
                    }
                    None
                };
                std::thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .spawn_scoped(scope, move || {
                        let value = work();
                        // The last handle: only now do the other ranks learn that this one left.
                        drop(member);
                        value
                    })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.ok().and_then(|thread| thread.join().ok()).flatten())
            .collect()
    });
    if let Some((rank, error)) = first_cause(failures.into_inner()) {
        tracing::debug!(rank, %error, "returning the error of this rank");
        return Err(error);
    }
    let count = results.len();
    let values: Vec<T> = results.into_iter().flatten().collect();
    if values.len() != count {
        return Err(Error::new(
            Kind::Panic,
            format!(
                "{} of {count} ranks could not be started as threads",
                count - values.len()
            ),
        ));
    }
    Ok(values)
}

/// Returns the failure that caused the others. A rank that aborts its group can return after the ranks that were waiting
/// for it, so this follows the culprits that the errors name. If they lead in a circle, it returns the first failure.
fn first_cause(mut failures: Vec<(usize, Error)>) -> Option<(usize, Error)> {
    let mut cause = 0;
    for _ in 0..failures.len() {
        let culprit = failures[cause].1.culprit().map(Culprit::rank);
        let next = failures.iter().position(|(rank, _)| Some(*rank) == culprit);
        match next.filter(|&next| next != cause) {
            Some(next) => cause = next,
            None => return Some(failures.swap_remove(cause)),
        }
    }
    (!failures.is_empty()).then(|| failures.swap_remove(0))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use accelerator_collective::GroupOptions;

    use super::*;

    #[test]
    fn the_cause_is_returned_even_if_its_rank_ends_last() {
        let groups = ProcessGroup::threads(3, &GroupOptions::new()).unwrap();
        let returned = AtomicBool::new(false);
        let outcome: Result<Vec<()>> = run(groups, |group| {
            if group.rank() == 2 {
                group.abort("the codebook is empty");
                while !returned.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                // By then the other ranks have returned; if not, the test passes without proving anything.
                std::thread::sleep(Duration::from_millis(100));
                return Err(Error::config("the codebook is empty"));
            }
            let error = group.barrier().unwrap_err();
            returned.store(true, Ordering::Release);
            Err(error.into())
        });
        let error = outcome.unwrap_err();
        assert!(error.is_config(), "{error:?}");
    }
}
