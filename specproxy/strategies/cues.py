"""Words that hint at what a request asks for, in the languages that users write most.

Each group holds lower-case words; `PHRASES` holds pieces of lower-case text for what words cannot catch:
several words in a row, and languages that write without spaces. A word may be in several groups; `classify`
decides what a combination means.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PHRASES", "PHRASES_CJK", "WORDS"]

# verbs that change a text that is there
_EDIT = """
rename refactor fix change modify replace rewrite update convert port remove delete add optimize optimise
simplify clean improve correct debug migrate inline annotate reformat adjust insert split merge adapt extend
repair rework restructure patch vectorize vectorise parallelize benenne umbenennen ändere ändern ersetze
ersetzen refaktoriere korrigiere korrigieren behebe beheben repariere ergänze ergänzen füge hinzu hinzufügen
entferne entfernen verbessere verbessern vereinfache portiere wandle cambia cambiar modifica modificar
reemplaza renombra corrige corregir añade añadir agrega elimina mejora mejorar optimiza arregla convierte
refactoriza simplifica renomme renommer modifie modifier remplace remplacer corriger ajoute ajouter supprime
supprimer améliore améliorer optimiser convertis refactorise simplifie rinomina correggi aggiungi rimuovi
renomeie corrija adicione remova altere исправь измени добавь перепиши удали замени
"""

# verbs that change code only where code is what the talk is about
_EDIT_OF_CODE = """
make use raise log return turn handle support avoid check should wrong error fails crashes bug compile without
"""

# verbs that make a text that is not there yet
_CREATE = """
write implement create develop build generate produce design draft compose construct prepare schreibe schreib
schreiben erstelle erstellen implementiere programmiere entwickle baue erzeuge verfasse escribe escribir crea
crear implementa desarrolla genera diseña redacta écris écrire écrivez crée créer créez implémente développe
génère rédige scrivi escreva crie implemente напиши создай реализуй
"""

# verbs that ask for a text in other words
_WANT = "give show need make want program code zeige muestra montre"

# what programmers call the things they write
_CODE = """
formula macro spreadsheet junit testcase repo página seite site fichier web one-liner oneliner codebase shader
userscript stylesheet webhook scraper crawler bot plugin extension boilerplate function functions algorithm
algorithms script scripts code class classes program programs regex regexp query html css api endpoint pytest
unittest dockerfile makefile struct method methods subroutine snippet module website webpage app cli component
cron leetcode parser compiler backend frontend recursion funktion funktionen skript programm klasse methode
quelltext función funciones programa clase código método consulta fonction fonctions programme classe méthode
requête funzione programma função классу функцию функция скрипт программу код
"""

_PROGRAMMING_LANGUAGE = """
nim groovy delphi vba vb.net f# erlang prolog arduino junit pytest numpy flutter vue angular svelte nextjs
laravel godot jq awk sed python javascript typescript java kotlin rust golang c++ c# ruby php scala haskell
perl lua bash powershell sql sqlite postgresql postgres mysql html css react django flask fastapi nodejs
pandas pytorch jquery elixir clojure ocaml js ts regex regexp fortran matlab cobol verilog vhdl solidity
graphql terraform kubernetes
"""

# words of the trade: code only beside a verb or a question how to do it
_TECH = """
unix linux shell command-line stopwatch calculator website landing navbar menu button chatbot scheduler proxy
daemon decoder encoder serializer validator linter webpage trie hashmap hash array arrays string strings
integer boolean loop variable linked stack mutex thread threads socket http https rest grpc json yaml xml csv
toml regex async await callback lambda iterator generator decorator pointer malloc segfault stacktrace
exception div flexbox selector npm pip git docker nginx redis webpack orm database schema migration login
oauth jwt websocket unicode utf-8 timestamp cli gui tkinter pygame timer endpoint crud hashing sorting
recursion dataframe
"""

_TRANSLATE = """
translate translating übersetze übersetzen übersetz übersetzt traduce traducir traduzca tradúceme traduis
traduire traduisez traduci tradurre traduza traduzir переведи переведите vertaal översätt
"""
_TRANSLATION = """
translation translations translator übersetzung übersetzer traducción traductor traduction traducteur
traduzione tradução перевод
"""
_CARRY_OVER = "say render put mean means idiomatic translate sagt heißt heisst dice dit significa signifie"

_LANGUAGE = """
english german french spanish italian portuguese dutch swedish polish japanese turkish chinese mandarin korean
russian arabic hindi greek latin danish norwegian finnish czech hungarian ukrainian vietnamese thai indonesian
hebrew romanian bulgarian catalan deutsch deutsche deutschen englisch englische englischen französisch
französische spanisch spanische italienisch inglés español alemán francés italiano portugués anglais français
allemand espagnol italien inglese tedesco francese английский русский немецкий
"""

_SUMMARISE = """
summarize summarise summary tldr condense abridge gist takeaways zusammenfassen zusammenfassung fasse
kurzfassung resume resumir resumen résume résumer résumez résumé riassumi resuma кратко перескажи
"""
_EXTRACT = """
extract identify cite quote retrieve extrahiere extrahieren finde nenne extrae extraer identifica cita extrais
extraire identifie estrai extraia
"""
_SOURCE = """
information info description content chapter manual faq knowledge transcript informationen información
informations text passage passages article document documents context paragraph excerpt notes report email
following above below provided attached minutes source sources contract artikel abschnitt dokument dokumente
folgenden folgende quelle kontext absatz texto artículo documento siguiente pasaje fuente contexto texte
suivant extrait contexte testo articolo seguente
"""

_EXPLAIN = """
recommend critique ideas idea tips reasons steps pros cons überlege gib explain describe suggest advise
discuss why compare elaborate define difference differences analyze analyse contrast evaluate clarify
understand erkläre erklär erklären beschreibe warum wieso vergleiche unterschied diskutiere explica explicar
explicarme explícame compara diferencia analiza explique expliquer décris décrire pourquoi différence spiega
объясни почему расскажи
"""
_PROSE_FORM = """
essay letter email e-mail mail blog speech review memo proposal post arguments argument plan tips steps advice
guide recommendation announcement outline newsletter biography itinerary editorial brief aufsatz bericht rede
ratschläge carta ensayo correo discurso lettre dissertation courriel discours
"""
_CREATIVE_FORM = """
lullaby rhyme rhymes ode elegy epic anthem jingle pun puns tongue-twister nursery insult prophecy saga
characters reim vers ballade wiegenlied rima nana personaje berceuse rime comptine personnage story stories
poem poems haiku sonnet limerick ballad lyrics song songs fable tale tales novel monologue dialogue dialog
screenplay scene legend backstory rap verse verses fiction roleplay role-play riddle joke jokes bard parody
fairytale myth villanelle geschichte gedicht gedichte märchen fabel lied kurzgeschichte witz legende cuento
cuentos poema poemas canción fábula historia novela chiste leyenda poème poèmes conte chanson histoire légende
blague racconto poesia favola conto стихотворение рассказ сказку
"""

_FANCY = """
whale robots robot moonlight kingdom witch giants giant monster monsters kraken prophecy oracle time-traveller
superhero sidekick shakespearean noir cyberpunk steampunk surreal spooky magical magic enchanted haunted
dragon dragons wizard pirate vampire ghost knight princess fairy unicorn mermaid alien galaxy villain fantasy
dystopian whimsical bedtime halloween imaginary drache hexe zauberer pirat gespenst brujo pirata fantasma
sorcière fantôme
"""

_MATH = """
log exponent exponential odds chance chances dice permutation permutations combinations angle angles isosceles
chord slope intercept vector vectors gcd lcm logarithmus winkel ángulo prime primes factor factorise factorize
differentiate median variance square cube cubed squared multiply divide divided multiplied primzahl wurzel
solve equation equations derivative integral calculate compute evaluate probability percent percentage
triangle perimeter circumference radius polynomial matrix determinant modulo remainder divisible factorial
logarithm prove theorem sqrt cosine sine hypotenuse quadratic eigenvalues eigenvalue simplify integrate
arithmetic fraction fractions sum ratio berechne berechnen löse gleichung ableitung wahrscheinlichkeit prozent
summe beweise calcula resuelve ecuación derivada probabilidad porcentaje calcule calculer résous équation
dérivée probabilité pourcentage вычисли реши уравнение
"""
_UNIT = """
cm mm meter centimeters inch mile yards zentimeter zentimetern metern fuß kilometer kilometern sekunden wochen
prozent km kilometers kilometres miles meters metres feet inches litres liters gallons kg grams pounds hours
minutes seconds days weeks months years dollars euros cents degrees mph percent price prices cost costs
stunden minuten tage euro liter horas minutos días metros litros heures jours
"""
_NUMBER_WORD = """
one two three four five six seven eight nine ten half twice thrice double triple third thirds quarter dozen
zwei drei vier halb doppelt dos tres mitad doble deux trois moitié
"""
_QUANTITY = """
altogether total average combien cuántos cuántas cuánto cuánta wieviel wieviele quanti quantos сколько
"""

_YOU = "you you're your yours yourself du dir dich dein tu te toi ton tú ti usted vous ты вы"
_SMALL_TALK = """
brb gn thx tysm aww ugh jaja jeje mdr ok! okey danke! ttyl omg yay hi hello hey hiya thanks thank bye goodbye
lol haha hmm hm ok okay yeah yep nope sorry bored congrats hallo danke tschüss servus moin hola gracias adiós
buenas salut merci bonjour bonsoir ciao grazie olá obrigado привет спасибо
"""
_CONTINUE = """
continue again shorter longer stranger funnier instead same previous above weiter nochmal kürzer länger sigue
continúa encore continuer suite
"""

_QUESTION = """
who whose whom when where which what what's whats why how how's hows is are does do did can could should wer
wann wo welche was wie warum quién cuándo dónde qué cómo qui quand où comment
"""

_HOW_TO = "how can could would wie cómo comment"

# what a request needs a tool for
_ACTION = """
find check get call text email set turn order buy pay cancel add create update remind start stop run open
search install deploy commit push book send schedule play lookup browse fetch download launch execute test
tests
"""
_LIVE = """
today tomorrow tonight currently current latest weather forecast weekend news heute morgen hoy mañana demain
yesterday nearby nearest flights traffic stock score gestern ayer ahora jetzt aktuell
"""

_GROUPS: Mapping[str, str] = {
    "edit": _EDIT,
    "edit_of_code": _EDIT_OF_CODE,
    "create": _CREATE,
    "want": _WANT,
    "code": _CODE,
    "programming_language": _PROGRAMMING_LANGUAGE,
    "tech": _TECH,
    "translate": _TRANSLATE,
    "translation": _TRANSLATION,
    "carry_over": _CARRY_OVER,
    "language": _LANGUAGE,
    "summarise": _SUMMARISE,
    "extract": _EXTRACT,
    "source": _SOURCE,
    "explain": _EXPLAIN,
    "prose_form": _PROSE_FORM,
    "creative_form": _CREATIVE_FORM,
    "fancy": _FANCY,
    "math": _MATH,
    "quantity": _QUANTITY,
    "unit": _UNIT,
    "number_word": _NUMBER_WORD,
    "you": _YOU,
    "small_talk": _SMALL_TALK,
    "continue": _CONTINUE,
    "question": _QUESTION,
    "how_to": _HOW_TO,
    "action": _ACTION,
    "live": _LIVE,
    "json": "json jsonl",
}


def _by_word() -> Mapping[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for group, text in _GROUPS.items():
        for word in text.split():
            table[word] = (*table.get(word, ()), group)
    return table


WORDS: Mapping[str, tuple[str, ...]] = _by_word()

PHRASES: tuple[tuple[str, str], ...] = (
    ("tl;dr", "summarise"),
    ("key points", "summarise"),
    ("main points", "summarise"),
    ("according to the", "extract"),
    ("based on the", "extract"),
    ("using only", "extract"),
    ("how many", "quantity"),
    ("how much", "quantity"),
    ("how long", "quantity"),
    ("how far", "quantity"),
    ("how old", "quantity"),
    ("how fast", "quantity"),
    ("how often", "quantity"),
    ("how high", "quantity"),
    ("how deep", "quantity"),
    ("how tall", "quantity"),
    ("what percent", "quantity"),
    ("what are the numbers", "quantity"),
    ("final price", "quantity"),
    ("wie viel", "quantity"),
    ("wie lange", "quantity"),
    ("por qué", "explain"),
    ("what is the difference", "explain"),
    ("unit test", "code"),
    ("fairy tale", "creative_form"),
    ("opening chapter", "creative_form"),
    ("surprise me", "creative_form"),
    ("look up", "action"),
    ("find me", "action"),
    ("what happens next", "continue"),
    ("go on", "continue"),
    ("what about", "continue"),
    ("how are you", "small_talk"),
    ("your name", "small_talk"),
    ("made you", "small_talk"),
    ("good night", "small_talk"),
    ("good morning", "small_talk"),
    ("sum up", "summarise"),
    ("boil this down", "summarise"),
    ("boil it down", "summarise"),
    ("in the style of", "fancy"),
    ("love letter from", "creative_form"),
    ("how r u", "small_talk"),
    ("never mind", "small_talk"),
    ("how's it going", "small_talk"),
    ("what's up", "small_talk"),
    ("guess what", "small_talk"),
    ("near me", "live"),
    ("right now", "live"),
    ("at this hour", "live"),
    ("to meet you", "small_talk"),
)

# languages without spaces between words: looked for only in text that is not all ASCII
PHRASES_CJK: tuple[tuple[str, str], ...] = (
    ("修改", "edit"),
    ("重构", "edit"),
    ("重命名", "edit"),
    ("修复", "edit"),
    ("改成", "edit"),
    ("替换", "edit"),
    ("优化", "edit"),
    ("添加", "edit"),
    ("删除", "edit"),
    ("修正", "edit"),
    ("変更", "edit"),
    ("追加", "edit"),
    ("写", "create"),
    ("编写", "create"),
    ("实现", "create"),
    ("创建", "create"),
    ("生成", "create"),
    ("書いて", "create"),
    ("作成", "create"),
    ("実装", "create"),
    ("函数", "code"),
    ("代码", "code"),
    ("程序", "code"),
    ("脚本", "code"),
    ("算法", "code"),
    ("関数", "code"),
    ("コード", "code"),
    ("翻译", "translate"),
    ("译成", "translate"),
    ("译为", "translate"),
    ("翻訳", "translate"),
    ("英訳", "translate"),
    ("和訳", "translate"),
    ("总结", "summarise"),
    ("概括", "summarise"),
    ("摘要", "summarise"),
    ("要約", "summarise"),
    ("提取", "extract"),
    ("根据", "extract"),
    ("文章", "source"),
    ("文本", "source"),
    ("以下", "source"),
    ("下面", "source"),
    ("解释", "explain"),
    ("说明", "explain"),
    ("为什么", "explain"),
    ("介绍", "explain"),
    ("比较", "explain"),
    ("説明", "explain"),
    ("讲一个", "creative_form"),
    ("诗", "creative_form"),
    ("故事", "creative_form"),
    ("小说", "creative_form"),
    ("歌词", "creative_form"),
    ("物語", "creative_form"),
    ("小説", "creative_form"),
    ("邮件", "prose_form"),
    ("一封信", "prose_form"),
    ("计算", "math"),
    ("求解", "math"),
    ("方程", "math"),
    ("概率", "math"),
    ("多少", "quantity"),
    ("几个", "quantity"),
    ("何個", "quantity"),
    ("何人", "quantity"),
    ("いくつ", "quantity"),
    ("いくら", "quantity"),
    ("你好", "small_talk"),
    ("谢谢", "small_talk"),
    ("在吗", "small_talk"),
    ("こんにちは", "small_talk"),
)
