//! Tells when this rank began, when it asked for the other ranks, and when it had its first sum: in seconds since 1970, in
//! the file of its rank in a folder. `benches/compare/start.py` starts it.

use std::{error::Error, time::UNIX_EPOCH};

use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};

fn main() -> Result<(), Box<dyn Error>> {
    let now = || UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
    let began = now();
    let folder = std::env::args().nth(1).ok_or("expected a folder")?;
    let launch = Launch::from_env()?;
    let asked = now();
    let group = ProcessGroup::connect(&launch, &GroupOptions::new())?;
    let mut sum = [1.0_f32];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    let ended = now();
    assert_eq!(sum, [group.world_size() as f32]);
    let path = format!("{folder}/{}", group.rank());
    std::fs::write(path, format!("{began} {asked} {ended}\n"))?;
    Ok(group.close()?)
}
