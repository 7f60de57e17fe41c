use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use accelerator_collective::rendezvous::{StoreOptions, StoreServer};
use accelerator_env::PREEMPTED_EXIT_CODE;

use super::{Accelerator, AcceleratorBuilder};
use crate::core::error::{Error, Kind, Result};

/// How long ranks have to end by themselves when one of them has failed: they name the failure meanwhile.
const GRACE: Duration = Duration::from_secs(10);
/// The job of ranks that [`launch_processes`] has started, by which they know it.
const JOB: &str = "launch_processes";

/// Runs `body` on `world_size` ranks, each a process, and waits until they have ended: this program is started
/// again for each rank, with the same arguments, and comes to this call again, where it runs `body` and exits.
///
/// This is how a program trains on several processes without [`accel-launch`](crate#how-a-program-is-started), as
/// Accelerate's `notebook_launcher` does. What stands before the call runs on each rank, too; what stands behind it runs
/// once, in the process that the user has started. Ranks write to its standard output and error. They end when it
/// ends, however that is.
///
/// In a program that `accel-launch`, torchrun, `mpirun`, `srun` or a cluster has started as one of several ranks, it starts
/// nothing, and runs `body` as that rank, whatever `world_size` says. A step of one task (`srun -n1`) starts ranks.
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
/// [`Error::is_config`] for 0 ranks; [`Error::is_io`] where the program cannot be started again;
/// [`Error::is_other`] with the rank that failed first, or where `body` ended since ranks were
/// [preempted](Accelerator::preempted). Each rank prints its own error.
pub fn launch_processes(
    world_size: usize,
    body: impl FnOnce(Accelerator) -> Result<()>,
) -> Result<()> {
    Accelerator::builder().launch_processes(world_size, body)
}

impl AcceleratorBuilder {
    /// See [`launch_processes`].
    ///
    /// ```no_run
    /// use accelerator::prelude::*;
    ///
    /// Accelerator::builder()
    ///     .accumulation_steps(4)
    ///     .launch_processes(2, |accelerator| accelerator.wait_for_everyone())?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`launch_processes`].
    pub fn launch_processes(
        self,
        world_size: usize,
        body: impl FnOnce(Accelerator) -> Result<()>,
    ) -> Result<()> {
        let is_rank = accelerator_env::variable("RANK").is_some();
        let is_ours =
            accelerator_env::variable(accelerator_env::JOB.name).is_some_and(|job| job == JOB);
        if is_one_of_several() || (is_rank && !is_ours) {
            return self.build()?.run(body);
        }
        if is_rank {
            end_with_parent();
            let ended = self.build().and_then(|accelerator| {
                let trigger = accelerator.shared.reduction.trigger.clone();
                accelerator.run(body)?;
                Ok(trigger.has_told_of_preemption())
            });
            std::process::exit(match ended {
                Ok(false) => 0,
                Ok(true) => PREEMPTED_EXIT_CODE.into(),
                Err(error) => {
                    eprintln!("Error: {error:?}");
                    1
                }
            });
        }
        if world_size == 0 {
            return Err(Error::config(
                "launch_processes: 0 ranks were asked for; at least 1 is needed",
            ));
        }
        let program = std::env::current_exe()?;
        let store = StoreServer::bind_with(
            ("127.0.0.1", 0),
            StoreOptions::new(world_size).with_job(JOB),
        )?;
        let port = store.local_addr().port();
        let ranks = (0..world_size).map(|rank| start(&program, rank, world_size, port));
        supervise(RankProcesses(ranks.collect::<Result<_>>()?))
    }
}

/// Whether another launcher, such as `mpirun`, has started several processes of this program.
fn is_one_of_several() -> bool {
    let read = |name: &str| {
        let value = accelerator_env::variable(name)?;
        Some(value.to_string_lossy().into_owned())
    };
    accelerator_collective::check_alone(read).is_err()
}

/// Starts this program again as a rank. Its standard input is a pipe that nobody writes to, and that closes when this
/// process ends.
fn start(program: &Path, rank: usize, world_size: usize, port: u16) -> Result<Child> {
    let (rank, world_size, port) = (rank.to_string(), world_size.to_string(), port.to_string());
    let place = [
        ("RANK", &*rank),
        ("LOCAL_RANK", &*rank),
        ("WORLD_SIZE", &*world_size),
        ("LOCAL_WORLD_SIZE", &*world_size),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &*port),
        (accelerator_env::PORT.name, &*port),
        (accelerator_env::STORE.name, "launcher"),
        (accelerator_env::JOB.name, JOB),
    ];
    let child = Command::new(program)
        .args(std::env::args_os().skip(1))
        .envs(place)
        // They are processes of one user on one host, whom the store lets in without a token.
        .env_remove(accelerator_env::TOKEN_FILE.name)
        .stdin(Stdio::piped())
        .spawn();
    child.map_err(|error| Error::io("start a rank of", program, error))
}

/// Ranks that run. They end when this is dropped.
struct RankProcesses(Vec<Child>);

impl Drop for RankProcesses {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // One that has ended is no error.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// Waits for all ranks; of several that fail, the first is told.
fn supervise(mut ranks: RankProcesses) -> Result<()> {
    let mut failed: Option<(usize, ExitStatus, Instant)> = None;
    loop {
        let mut running = 0;
        for (rank, child) in ranks.0.iter_mut().enumerate() {
            match child.try_wait()? {
                None => running += 1,
                Some(status) if !status.success() && failed.is_none() => {
                    failed = Some((rank, status, Instant::now()));
                }
                Some(_) => {}
            }
        }
        let is_late = failed.is_some_and(|(_, _, at)| at.elapsed() > GRACE);
        match failed {
            Some((rank, status, _)) if running == 0 || is_late => {
                let message = match status.code() == Some(PREEMPTED_EXIT_CODE.into()) {
                    true => "the ranks were preempted: start the program again".to_owned(),
                    false => format!("rank {rank} of {} failed: {status}", ranks.0.len()),
                };
                return Err(Error::new(Kind::Other, message));
            }
            None if running == 0 => return Ok(()),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Ends this rank when the process that has started it is gone, and closes its standard input with it.
fn end_with_parent() {
    let watch = || {
        let mut input = std::io::stdin().lock();
        let mut bytes = [0; 64];
        while matches!(input.read(&mut bytes), Ok(count) if count > 0) {}
        std::process::exit(1);
    };
    // Without a thread, ranks notice by their heartbeats.
    let _ = std::thread::Builder::new()
        .name("parent".to_owned())
        .spawn(watch);
}
