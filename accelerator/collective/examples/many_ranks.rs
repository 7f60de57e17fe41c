//! Measures what one rank costs in a job with many ranks: time to connect and to all-reduce, memory, descriptors and
//! threads. Rank 0 prints the maximum of each over all ranks. Start it with
//! `accel-launch --num-processes 128 target/release/examples/many_ranks`.

use std::{error::Error, fs, time::Instant};

use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};

fn main() -> Result<(), Box<dyn Error>> {
    let before = pss_kib();
    let began = Instant::now();
    let group = ProcessGroup::connect(&Launch::from_env()?, &GroupOptions::new())?;
    let met = began.elapsed();
    let mut times = Vec::new();
    for bytes in [4 << 10, 1 << 20] {
        let mut values = vec![1.0_f32; bytes / size_of::<f32>()];
        let began = Instant::now();
        group.all_reduce(&mut values, ReduceOp::Sum)?;
        times.push(began.elapsed());
        assert!(values.iter().all(|x| *x == group.world_size() as f32));
    }
    let mut costs = [
        met.as_secs_f64(),
        times[0].as_secs_f64(),
        times[1].as_secs_f64(),
        pss_kib().saturating_sub(before) as f64 / 1024.0,
        count("/proc/self/fd") as f64,
        count("/proc/self/task") as f64,
    ];
    group.all_reduce(&mut costs, ReduceOp::Max)?;
    if group.rank() == 0 {
        let [met, small, large, memory, descriptors, threads] = costs;
        println!(
            "{} ranks over {}: {met:.2} s to connect, {small:.3} s for 4 KiB, {large:.3} s for 1 MiB; a rank has at most \
             {memory:.1} MiB more than at its start, {descriptors} descriptors and {threads} threads",
            group.world_size(),
            group.transport()
        );
    }
    Ok(group.close()?)
}

/// The proportional set size of this process in KiB: a page that n processes share counts as 1/n.
fn pss_kib() -> u64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = rollup.lines().find(|line| line.starts_with("Pss:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    kib.unwrap_or(0)
}

fn count(folder: &str) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}
