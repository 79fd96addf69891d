"""The page shell: escaping, contents, tables, pictures. `test_pages.py` opens it in a browser."""

from __future__ import annotations

import re

from veca._util.html import Box, Card, Page, Part, html_table


def test_page_escapes_and_is_written_whole(tmp_path):
    page = Page("a < b", "c > d")
    page.heading("h & h")
    page.text('say "x" by `veca <y>`', "note")
    page.table(["n"], [["<1>"]])
    page.pictures([('p".png', "alt")], "c & d")
    page.cards([Card('q".jpg', "<n>", link="l&m", value="0.5")])
    page.facts([("<2>", "of 3")])
    page.made_by("veca <z>")
    text = page.write(tmp_path / "new" / "page.html").read_text()
    assert "<title>a &lt; b</title>" in text and "<td>&lt;1&gt;</td>" in text
    assert 'src="p&quot;.png"' in text and '<p class="note">' in text
    assert "by <code>veca &lt;y&gt;</code>" in text and "<code>veca &lt;z&gt;</code>" in text
    assert '<a href="l&amp;m">&lt;n&gt;</a>' in text and "<strong>&lt;2&gt;</strong>" in text
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["page.html"]


def test_the_same_parts_give_the_same_bytes_and_nothing_is_fetched(tmp_path):
    def write(name):
        page = Page("t")
        page.panels("p.png", (90, 40), [[Part("one", Box(10, 10, 30, 20))]])
        return page.write(tmp_path / name).read_bytes()

    assert write("a.html") == write("b.html")
    text = write("a.html").decode()
    assert not re.findall(
        r"https?://|//[a-z]", re.sub(r"<script>.*</script>", "", text, flags=re.S)
    )
    assert "default-src 'none'" in text


def test_contents_list_headings_once_each(tmp_path):
    page = Page("t")
    for text, level in (("One", 2), ("Part", 3), ("Part", 3), ("Two!", 2)):
        page.heading(text, level)
    text = page.write(tmp_path / "p.html").read_text()
    links = re.findall(r'<a href="#([^"]+)">', text)
    assert links == ["one", "part", "part-2", "two"]
    assert all(f'id="{link}"' in text for link in links)
    listed = re.search(r"<ul>(.*)</ul></details>", text)
    assert listed and listed[1].count("<ul>") == 1  # both parts in one list below "One"
    page = Page("t")
    page.heading("alone")
    assert "<details" not in page.write(tmp_path / "q.html").read_text()


def test_columns_of_numbers_are_told_from_text():
    table = html_table(
        ["name", "share", "mixed", "px", "empty"],
        [["a", "97.4 % ±0.8", "0.81 (teacher)", "240x320", ""], ["b", "±3", "1", "512", ""]],
    )
    marked = re.findall(r'<th class="number">(\w+)', table)
    assert marked == ["share", "px"] and table.count('<td class="number">') == 4
    assert html_table(["a"], []).count("<th>") == 1


def test_panels_are_parts_of_one_picture(tmp_path):
    page = Page("t")
    scaled = Part("two", Box(50, 10, 30, 20), Box(50, 34, 30, 8), ("0.1", "0.9"))
    page.panels("p.png", (90, 60), [[Part("one", Box(10, 10, 30, 20)), scaled], [scaled]], "what")
    text = page.write(tmp_path / "p.html").read_text()
    assert text.count('href="p.png"') == 1 and text.count("<figcaption>what</figcaption>") == 1
    assert len(re.findall(r'<button[^>]*class="zoom"', text)) == 3
    views = re.findall(r'viewBox="([^"]+)" role="img"', text)
    x, y, width, height = map(float, views[0].split())
    assert 10 <= x < 11 and 10 <= y < 11 and 39 < x + width <= 40 and 29 < y + height <= 30
    assert text.count('<div class="scale">') == 2 and "<span>0.9</span>" in text
