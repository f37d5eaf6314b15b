//! The files of the page, from `src/page`. They hold nothing of the server, so they need no token.

use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;

use super::super::Shared;

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// The files: path, type, content.
const FILES: [(&str, &str, &[u8]); 5] = [
    ("/", HTML, include_bytes!("../../page/index.html")),
    ("/app.js", SCRIPT, include_bytes!("../../page/app.js")),
    ("/style.css", STYLE, include_bytes!("../../page/style.css")),
    ("/uplot.js", SCRIPT, include_bytes!("../../page/uplot/uPlot.iife.min.js")),
    ("/uplot.css", STYLE, include_bytes!("../../page/uplot/uPlot.min.css")),
];

/// The routes of the files.
pub fn routes() -> axum::Router<Shared> {
    FILES.into_iter().fold(axum::Router::new(), |router, (path, kind, bytes)| {
        router.route(path, get(move || async move { file(kind, bytes) }))
    })
}

fn file(kind: &'static str, bytes: &'static [u8]) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, kind)], bytes)
}
