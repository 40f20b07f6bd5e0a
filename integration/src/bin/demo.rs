//! Scratch measurement.
use anyhow::Result;
use coldsnap_integration::ctr::STOCK;
use coldsnap_integration::node::{Node, With};
use coldsnap_integration::{llama, memory};
fn main() -> Result<()> {
    let node = Node::start("scratch", With::StockOnly)?;
    let ctr = node.ctr();
    let archive = std::path::Path::new("/tmp/llama.tar");
    llama::write_image(archive)?;
    ctr.import(archive, STOCK.snapshotter)?;
    let log = node.logs().join("llama.log");
    for i in 0..4 {
        if i % 2 == 1 {
            memory::drop_caches()?;
        }
        let id = format!("c{i}");
        let launch = llama::launch(STOCK, llama::IMAGE, &id, &log)?;
        let (spoken, took) = llama::time_to_first_token(ctr, &id, || ctr.start(&launch))?;
        println!("{took:?} {:?} {:?}", spoken.text, spoken.tokens_per_second());
        let s = llama::ask(ctr.init_pid(&id)?, 200)?;
        println!(
            "tps {} {:?} pids {:?}",
            s.tokens_per_second(),
            memory::of(&ctr.pids(&id)?)?,
            ctr.pids(&id)?
        );
        if i == 3 {
            let before = node.content_bytes()?;
            println!(
                "{}",
                ctr.run(["containers", "checkpoint", "--rw", "--task", "--image", &id, "demo.local/peer:1"])?
            );
            println!("stored {}", node.content_bytes()? - before);
        }
        ctr.remove(&id)?;
    }
    for i in 0..6 {
        if i % 2 == 1 {
            memory::drop_caches()?;
        }
        let id = format!("p{i}");
        let (spoken, took) = llama::time_to_first_token(ctr, &id, || {
            ctr.run(["containers", "restore", "--live", &id, "demo.local/peer:1"])
                .and_then(|_| coldsnap_integration::netns::raise_loopback(ctr.init_pid(&id)?))
        })?;
        println!(
            "peer {took:?} {:?} {:?} {:?}",
            spoken.text,
            spoken.tokens_per_second(),
            memory::of(&ctr.pids(&id)?)?
        );
        ctr.remove(&id)?;
    }
    node.assert_clean()?;
    Ok(())
}
