//! Memory that the ranks of one host share: its layout, and the rules of who may touch what.
#![expect(
    unsafe_code,
    reason = "memory that other ranks write to has no references; see the README of this folder"
)]

mod arena;
mod free_list;
mod header;
mod hosts;
mod memory;
mod peers;
mod seq_counter;

pub(crate) use arena::{Arena, ArenaId, Region, SHM_CHUNK};
pub(crate) use header::HeaderDigest;
pub(crate) use hosts::Hosts;
pub(crate) use memory::MemoryRange;
pub(crate) use peers::ShmPeers;
pub(crate) use seq_counter::Spin;
