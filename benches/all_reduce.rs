//! An all-reduce of two ranks, over each transport, beside a copy of the same bytes.
//!
//! `cargo bench -p accelerator-benches --bench all_reduce`

#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

use std::net::TcpListener;
use std::time::Duration;

use accelerator_benches::median;
use accelerator_collective::{
    GroupOptions, Launch, ProcessGroup, ReduceOp, Rendezvous, Result, Topology,
};

const RANKS: usize = 2;

fn main() -> Result<()> {
    println!("all-reduce of f32 sums, {RANKS} ranks on one host; medians");
    println!(
        "{:>10} {:>12} {:>12} {:>12}",
        "bytes", "threads", "tcp", "one copy"
    );
    for bytes in [4 << 10, 64 << 10, 1 << 20, 25_000_000] {
        let threads = on_ranks(ProcessGroup::threads(RANKS, &GroupOptions::new())?, bytes)?;
        let tcp = on_ranks(tcp()?, bytes)?;
        println!(
            "{bytes:>10} {:>12} {:>12} {:>12}",
            shown(threads),
            shown(tcp),
            shown(copy(bytes))
        );
    }
    Ok(())
}

/// Rank 0's median, both ranks being threads of this process.
fn on_ranks(groups: Vec<ProcessGroup>, bytes: usize) -> Result<Duration> {
    let runs = (400_000_000 / bytes).clamp(15, 2000);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let mut values = vec![1.0_f32; bytes / 4];
                    let mut outcome = Ok(());
                    let time = median(runs, || {
                        let result = group.all_reduce(&mut values, ReduceOp::Mean);
                        if outcome.is_ok() {
                            outcome = result;
                        }
                    });
                    outcome.and_then(|()| group.barrier()).map(|()| time)
                })
            })
            .collect();
        let times: Result<Vec<Duration>> = ranks
            .into_iter()
            .map(|rank| {
                rank.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect();
        Ok(times?.into_iter().next().unwrap_or_default())
    })
}

fn tcp() -> Result<Vec<ProcessGroup>> {
    let port = TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map_or(29_500, |address| address.port());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                scope.spawn(move || {
                    let launch = Launch::new(
                        Topology::new(rank, RANKS)?,
                        Rendezvous::new("127.0.0.1", port),
                    );
                    ProcessGroup::connect(&launch, &GroupOptions::new())
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| {
                rank.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}

/// The bound of anything that moves these bytes once.
fn copy(bytes: usize) -> Duration {
    let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    median(50, || {
        to.copy_from_slice(&from);
        std::hint::black_box(&to);
    })
}

fn shown(time: Duration) -> String {
    format!("{:.1} µs", time.as_secs_f64() * 1e6)
}
