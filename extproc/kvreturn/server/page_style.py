"""How the admin page looks, and the few lines that keep it fresh."""

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--line:#e3e6eb;--text:#1c2430;--dim:#667085;--warm:#1a9d6c;--cold:#d9a13b;--fresh:#8aa4c8;
--broken:#d5483f;--soft:#fdf0ee}
@media (prefers-color-scheme:dark){:root{--bg:#11151b;--card:#1a2029;--line:#2b333f;--text:#e4e8ee;--dim:#8f9bad;
--warm:#35c48d;--cold:#d8a544;--fresh:#5f7ea8;--broken:#ee6b60;--soft:#33201f}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 24px 48px;max-width:1240px;background:var(--bg);color:var(--text);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
header{display:flex;gap:12px;align-items:baseline;margin-bottom:14px}
h1{font-size:20px;margin:0;letter-spacing:-.01em}
h2{font-size:12px;font-weight:600;margin:0 0 8px;color:var(--dim);letter-spacing:.02em}
p{margin:4px 0}ul{margin:4px 0;padding-left:18px}
#age{margin-left:auto}
.dim{color:var(--dim)}.good{color:var(--warm)}.bad{color:var(--broken)}
.mono{font-family:ui-monospace,"SF Mono",Menlo,"DejaVu Sans Mono",monospace;font-size:12px}
th.mono{font-family:inherit}
.card,.tile,.trouble,.note{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;
margin-bottom:14px;min-width:0}
.trouble{background:var(--soft);border-color:var(--broken)}.trouble h2{color:var(--broken)}
.tiles{display:grid;grid-template-columns:1fr 2.2fr 1fr 1.3fr;gap:14px}
.two{display:grid;grid-template-columns:1fr 1fr;gap:14px}
@media (max-width:900px){.tiles,.two{grid-template-columns:1fr}}
.big{font-size:30px;line-height:1.15;font-weight:600;margin:0;letter-spacing:-.02em}
.wide{display:grid;grid-template-columns:auto 1fr;column-gap:20px;align-items:end;align-content:start}
.wide h2,.wide p.dim{grid-column:1/-1}
.chart{width:100%;height:44px;display:block}
.strip{width:100%;height:20px;display:block}
.warm{fill:var(--warm)}.cold{fill:var(--cold)}.fresh{fill:var(--fresh)}.broken{fill:var(--broken)}.none{fill:var(--line)}
.bar{display:grid;grid-template-columns:170px 1fr 70px;gap:10px;align-items:center;padding:1px 0}
.meter{width:100%;height:8px;display:block;background:var(--bg);border-radius:4px}
.load{min-width:80px}
table{border-collapse:collapse;width:100%}
th{font-weight:500;color:var(--dim);text-align:left;font-size:12px;padding:2px 10px 4px 0;white-space:nowrap}
td{padding:3px 10px 3px 0;border-top:1px solid var(--line);white-space:nowrap;vertical-align:middle}
.num{text-align:right}th.num{text-align:right}td.num,th.num{padding-right:18px}
.name{max-width:180px;overflow:hidden;text-overflow:ellipsis}
.scroll{overflow-x:auto}
.dot{display:inline-block;width:8px;height:8px;border-radius:50%;margin:0 6px 0 0;background:var(--line)}
.key .dot{margin-left:14px}.key .dot:first-child{margin-left:0}
.dot.warm{background:var(--warm)}.dot.broken{background:var(--broken)}.dot.cold{background:var(--cold)}
.dot.fresh{background:var(--fresh)}
.marked td{color:var(--broken)}
dl{display:grid;grid-template-columns:auto 1fr;gap:2px 18px;margin:0}dt{color:var(--dim)}
dd{margin:0;overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--dim);font-weight:600;font-size:12px}
.settings table{margin-top:8px}.settings td{white-space:normal;overflow-wrap:anywhere;color:var(--dim)}
.settings .marked td{color:var(--text)}
"""

SCRIPT = """
"use strict";
const age=document.getElementById("age");let last=Date.now(),ok=true;
async function refresh(){
  try{
    const answer=await fetch("/",{cache:"no-store",signal:AbortSignal.timeout(5000)});
    if(!answer.ok)throw 0;
    const fresh=new DOMParser().parseFromString(await answer.text(),"text/html");
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    last=Date.now();ok=true;
  }catch{ok=false}
  tell();
  setTimeout(refresh,document.hidden?10000:2000);
}
function tell(){
  age.textContent=ok?"live":"no answer for "+Math.round((Date.now()-last)/1000)+" s";
  age.className=ok?"dim":"bad";
}
setTimeout(refresh,2000);
"""
